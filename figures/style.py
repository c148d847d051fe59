"""What every figure shares: colours, type, captions, and files whose bytes depend on the record alone."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml
from fontTools import subset
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from kvnotes.records import Record, write_atomically

# Okabe and Ito's palette, told apart with every common colour blindness.
VERMILLION, BLUE, GREEN = "#D55E00", "#0072B2", "#009E73"
INK, GREY, PALE, BAND = "#222222", "#6B6B6B", "#D0D0D0", "#F5F5F5"
# A colour and a marker a model. Simulated colour blindness leaves every two of the colours apart (a test works it out),
# and the markers tell them apart in a grey print.
MODEL_COLOURS = (BLUE, VERMILLION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#661100")
MODEL_MARKERS = ("o", "s", "^", "v", "P", "X", "p", "*", "h")
DPI = 150
_CAPTION_SIZE, _LINE_SPACING = 7.5, 1.35
_DATES = ("CreationDate", "Creator", "Producer")  # what a PDF says of when and by what it was made
# How a program that sets text picks and moves a font's glyphs. A PDF holds glyphs that stand where they are, so its
# readers ask for none of these; cutting them down to a page's glyphs would take a quarter of all the time.
_SETTING_TABLES = ("GDEF", "GPOS", "GSUB", "MATH", "kern")
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same letters
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "text.color": INK,
    "text.parse_math": False,  # a "$" in a model's name is a dollar
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.8,
    "pdf.fonttype": 42,  # text stays text
    "savefig.facecolor": "white",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save under the project's settings, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


@cache
def published() -> dict[str, Any]:
    """The paper's numbers, from `published.yaml`."""
    return yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


def lighter(colour: str, share: float = 0.6) -> tuple[float, float, float]:
    """A colour mixed with that share of white."""
    red, green, blue = (part + (1 - part) * share for part in to_rgb(colour))
    return red, green, blue


def darker(colour: str, share: float = 0.3) -> tuple[float, float, float]:
    """A colour mixed with that share of black, for small text."""
    red, green, blue = (part * (1 - share) for part in to_rgb(colour))
    return red, green, blue


def model_look(index: int) -> tuple[str, str]:
    """The colour and the marker of a page's model; no two of the first 72 are the same."""
    return MODEL_COLOURS[index % len(MODEL_COLOURS)], MODEL_MARKERS[index % len(MODEL_MARKERS)]


def number(value: float) -> str:
    """Two decimals and a real minus sign; zero has no sign."""
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text.replace("-", "\N{MINUS SIGN}")


def as_published(value: float) -> str:
    """One of the paper's values with all the digits that it has there, two at least."""
    exact = repr(abs(value)).partition(".")[2]
    return f"{value:.{max(2, len(exact))}f}".replace("-", "\N{MINUS SIGN}")


def panel_title(ax: Axes, letter: str, title: str, *, above: float = 0.0) -> None:
    """A panel's letter in bold, where it has one, before what it shows; `above` is room for words below it, in
    points."""
    if not letter:
        ax.set_title(title, pad=6 + above)
        return
    ax.set_title(letter, fontweight="bold", pad=6 + above)
    # Two spaces on from the letter, at the same height whatever the axes' size.
    at = (24, 6 + above)
    ax.annotate(title, (0, 1), at, xycoords="axes fraction", textcoords="offset points", fontsize=9.5)


def caption(record: Record) -> str:
    """What a reader must know to trust a figure: model, precision, pairs, exclusions, intervals, noise."""
    model, counts = record.model, record.inclusion
    reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.excluded.items())
    drawn = [one for one in record.summary.effects if counts.included and one.low is not None]
    kinds = dict.fromkeys(f"{one.level:.0%} {one.method}" for one in drawn)
    parts = [
        f"{model.name}, {model.precision}, {model.dtype} on {model.device}",
        f"{counts.included} pairs included of {counts.used} used of {counts.generated} generated, "
        f"in {counts.scenarios} scenarios",
        f"Excluded: {reasons or 'none'}",
        f"Intervals: {'; '.join(kinds) or 'none'}",
        f"Noise floor: {'unknown' if model.noise_floor is None else f'{model.noise_floor:.1g} logits'}",
    ]
    return ". ".join(parts) + "."


def add_footer(figure: Figure, *, handles: Sequence[Artist], columns: int, lines: Sequence[str]) -> None:
    """Make a figure taller by a legend and, under it, paragraphs of small text wrapped to its width."""
    body, wide = figure.get_figheight(), int(figure.get_figwidth() * 72 / (_CAPTION_SIZE * 0.56))
    small = [part for line in lines for part in textwrap.wrap(line, wide)]
    step = _CAPTION_SIZE * _LINE_SPACING / 72
    caption_height = 0.14 + len(small) * step
    legend_height = 0.12 + 0.19 * math.ceil(len(handles) / columns) if handles else 0.0
    height = body + caption_height + legend_height
    figure.set_figheight(height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 1 - body / height, 1, body / height)))
    if handles:
        anchor = (0.0, caption_height / height)
        legend = figure.legend(handles=handles, loc="lower left", bbox_to_anchor=anchor, ncols=columns)
        legend.set_in_layout(False)
    for at, part in enumerate(small):  # a text each: of several lines in one, matplotlib forgets what `save` sets
        place = (caption_height - 0.04 - at * step) / height
        note = figure.text(0.01, place, part, fontsize=_CAPTION_SIZE, color=GREY)
        note.set(verticalalignment="top", in_layout=False)


@contextmanager
def glyphs_alone() -> Iterator[None]:
    """Embed fonts without the tables for setting text. matplotlib has no option for it, and its subsetter reads its
    own default anew each time; were that gone, the pages would be drawn the same, only slower."""
    default = getattr(subset.Options, "_drop_tables_default", None)
    if default is None:
        yield
        return
    subset.Options._drop_tables_default = [*default, *_SETTING_TABLES]
    try:
        yield
    finally:
        subset.Options._drop_tables_default = default


def save(figure: Figure, path: Path) -> list[Path]:
    """Write `path`.png and `path`.pdf with no date or version in them: the same record gives the same bytes.

    Raises:
        RecordError: if a file cannot be written.
    """
    for text in figure.findobj(Text):
        # without ligatures: a PDF would embed each font a second time for them, and "field" is found as it is typed
        text.set_fontfeatures(["-liga"])
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")  # laid out once, not again for each kind of file
    figure.set_facecolor("white")
    files = []
    # the canvases' own writers draw once, where savefig draws a first time for a layout that is made already
    writers: dict[str, Callable[[io.BytesIO], object]] = {
        "png": lambda to: FigureCanvasAgg(figure).print_png(to, metadata={"Software": None}),
        "pdf": lambda to: FigureCanvasPdf(figure).print_pdf(to, metadata=dict.fromkeys(_DATES)),
    }
    for kind, write in writers.items():
        buffer = io.BytesIO()
        with glyphs_alone():
            write(buffer)
        files.append(path.with_name(f"{path.name}.{kind}"))
        write_atomically(buffer.getvalue(), files[-1])
    return files
