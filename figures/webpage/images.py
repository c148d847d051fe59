"""Every figure as a small picture within the page: drawn at a screen's size, in coarser colours, WebP without loss."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from figures import build, side
from figures.webpage.data import Shelf
from kvnotes.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110  # text of 7.5 points is 11 pixels high
STEP = 17  # a colour's red, green and blue are rounded to multiples: 16 shades of each, none off by more than 8 of 255


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure as a data URL with its size in pixels; or, with `said`, why there is none."""

    name: str
    title: str
    alt: str = ""
    url: str = ""
    width: int = 0
    height: int = 0
    said: str = ""


def of_model(shelf: Shelf) -> list[Picture]:
    """The figures of a model's records, in the order of the studies, and why others have none."""
    from figures import style
    from figures.webpage.data import studies

    rank = {study: at for at, study in enumerate(studies())}
    held = {*shelf.drawable, *shelf.undrawn}
    with style.styled():
        ordered = sorted(held, key=lambda name: (rank.get(name.split("/")[1], len(rank)), name))
        return [one for name in ordered for one in _of_record(name, shelf)]


def _of_record(name: str, shelf: Shelf) -> list[Picture]:
    study = name.split("/")[1]
    if name in shelf.undrawn:
        return [_none(name, study, shelf.undrawn[name])]
    record = shelf.records[name]
    made, why = side.attempt(lambda: _pictures(name, record), again=f"make probe-{study}")
    return [_none(name, record.title, why)] if made is None else made


def _pictures(name: str, record: Record) -> list[Picture]:
    drawn = build.draw(record.study, {name: record}) if record.study in build.studies() else {}
    return [_picture(key, figure, title=record.title, alt=_alt(record)) for key, figure in drawn.items()]


def _none(name: str, title: str, reason: str) -> Picture:
    return Picture(name=name, title=title, said=f"Not drawn: {reason.rstrip('.')}.")


def side_by_side(shelves: Sequence[Shelf]) -> list[Picture]:
    """The figures of several models: what studies draw of them together, and the composed pages."""
    from figures import style

    records = {name: one for shelf in shelves for name, one in shelf.drawable.items()}
    faults = {name: reason for shelf in shelves for name, reason in shelf.undrawn.items()}
    whose = f"Models: {', '.join(dict.fromkeys(one.model.name for one in records.values()))}."
    with style.styled():
        together = list(_together(records, whose)) if len(shelves) > 1 else []
        return [*together, *_composed(records, faults, whose)]


def _together(records: Mapping[str, Record], whose: str) -> Iterator[Picture]:
    """What a study draws of several models; each record's own figures stand in its model's section."""
    for study in build.studies():
        some = {name: one for name, one in records.items() if one.study == study}
        title = f"{study}, side by side"
        drawn, faults = build.draw_safely(study, some) if some else ({}, {})
        for key, figure in drawn.items():
            if not any(key == name or key.startswith(f"{name}-") for name in some):
                yield _picture(key, figure, title=title, alt=f"{title}. {whose}")
        if reason := faults.get(build.side_by_side(study)):
            yield _none(build.side_by_side(study), title, reason)


def _composed(records: Mapping[str, Record], faults: Mapping[str, str], whose: str) -> Iterator[Picture]:
    """The paper's figures and tables with our values."""
    from figures import composed

    for name in composed.whole():
        page = composed.get(name)
        models = composed.models_of(page, records, layout=build.LAYOUT, faults=faults)
        if any(side.readable(found) for found in models.values()):
            alt = f"{page.heading}, with our values beside it. {whose}"
            made, why = side.attempt(
                lambda name=name, page=page, models=models, alt=alt: _picture(
                    name, composed.figure(page, models), title=page.heading, alt=alt
                ),
                again="make figures",
            )
            yield made or _none(name, page.heading, why)


def _alt(record: Record) -> str:
    counts = record.inclusion
    return (
        f"{record.title}; {record.model.name}, layout {record.layout}. {counts.included} of {counts.used} pairs "
        f"included. {record.summary.headline}"
    )


def _picture(name: str, figure: Figure, *, title: str, alt: str) -> Picture:
    data, (width, height) = encode(figure)
    url = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
    return Picture(name=name, title=title, alt=alt, url=url, width=width, height=height)


def encode(figure: Figure) -> tuple[bytes, tuple[int, int]]:
    """A figure as WebP without loss, and its size in pixels. The same figure gives the same bytes."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    coarse = Image.open(drawn).convert("RGB").point([round(shade / STEP) * STEP for shade in range(256)] * 3)
    out = io.BytesIO()
    coarse.save(out, "WEBP", lossless=True, quality=60, method=4)
    return out.getvalue(), coarse.size
