"""Every figure as a small picture within the page: drawn at a screen's size, in coarser colours, WebP without loss."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from figures import build
from figures.webpage.data import Shelf
from kvnotes.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110  # text of 7.5 points is 11 pixels high
STEP = 17  # a colour's red, green and blue are rounded to multiples: 16 shades of each, none off by more than 8 of 255
FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


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
    """The figures of a model's records, in the order of the studies."""
    from figures import style
    from figures.webpage.data import studies

    rank = {study: at for at, study in enumerate(studies())}
    ordered = sorted(shelf.records.items(), key=lambda item: (rank.get(item[1].study, len(rank)), item[0]))
    with style.styled():
        return [one for name, record in ordered for one in _of_record(name, record)]


def _of_record(name: str, record: Record) -> Iterator[Picture]:
    try:
        drawn = build.draw(record.study, {name: record}) if record.study in build.studies() else {}
    except FAULTS as error:  # a record of another version may lack a table or a measure: the page goes on
        said = f"This figure cannot be drawn ({type(error).__name__}: {error}). Run `make probe-{record.study}` again."
        yield Picture(name=name, title=record.title, said=said)
        return
    for key, figure in drawn.items():
        yield _picture(key, figure, title=record.title, alt=_alt(record))


def side_by_side(shelves: Sequence[Shelf]) -> list[Picture]:
    """The figures of several models: what studies draw of them together, and the composed pages."""
    from figures import style

    records = {name: one for shelf in shelves for name, one in shelf.records.items()}
    with style.styled():
        return list(_together(records))


def _together(records: Mapping[str, Record]) -> Iterator[Picture]:
    models = list(dict.fromkeys(one.model.name for one in records.values()))
    whose = f"Models: {', '.join(models)}."
    for study in build.studies() if len(models) > 1 else ():
        some = {name: one for name, one in records.items() if one.study == study}
        try:
            drawn = build.draw(study, some) if some else {}
        except FAULTS:
            continue  # each record's own place says that it cannot be drawn
        title = f"{study}, side by side"
        for key, figure in drawn.items():
            if not any(key == name or key.startswith(f"{name}-") for name in some):
                yield _picture(key, figure, title=title, alt=f"{title}. {whose}")
    yield from _composed(records, whose)


def _composed(records: Mapping[str, Record], whose: str) -> Iterator[Picture]:
    """The paper's figures and tables with our values."""
    from figures import composed

    for name in composed.whole():
        page = composed.get(name)
        try:
            models = composed.models_of(page, records, layout=build.LAYOUT, faults={})
            drawn = composed.figure(page, models) if models else None
        except FAULTS as error:
            yield Picture(name=name, title=page.heading, said=f"It cannot be drawn ({type(error).__name__}: {error}).")
            continue
        if drawn is not None:
            yield _picture(name, drawn, title=page.heading, alt=f"{page.heading}, with our values beside it. {whose}")


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
