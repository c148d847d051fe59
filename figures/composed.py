"""Pages of several models: panels from the records of several studies, and the same numbers as Markdown and LaTeX.

A panel that no record can fill says which study is missing and how to run it; a model without a number says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import side
from figures.side import Counts, Measure, Models, Said
from kvnotes.errors import UnknownName
from kvnotes.records import Record, write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "paper"
SOURCES = ("four_probes", "families", "circuit")  # modules of this package that have PAGES
SAID = 9.5  # points of a line of words above a panel
WIDTH = 8.0  # inches of a page: at 7 inches, as it is printed, the smallest letters are 6 points high
AROUND = 0.85  # inches of a panel's title, ticks and axis label
LINES = 2.6  # inches of a panel of lines or points


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of a page: what it asks of which studies, the numbers it shows, and how it draws them."""

    title: str
    measures: tuple[Measure, ...]
    draw: Callable[[Axes, Models], Said]
    height: Callable[[int], float]
    """Inches, by the number of models."""
    xlabel: str = ""
    counts: Counts | None = None
    listed: Callable[[Models], Iterator[list[str]]] | None = None
    """Further rows of its table: what it draws that is no measure, a cell a model and the paper's values."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Further markers of the legend, by their words."""

    @property
    def studies(self) -> tuple[str, ...]:
        """The studies whose records it is drawn from."""
        return tuple(dict.fromkeys(one.study for one in self.measures))


def rows(title: str, measures: Sequence[Measure], *, xlabel: str = "") -> Panel:
    """A panel with a row a measure."""
    return Panel(
        title=title,
        measures=tuple(measures),
        draw=lambda ax, models: side.panel_measures(ax, measures, models),
        height=partial(side.rows_height, measures),
        xlabel=xlabel or "recovery R  (0: like base, 1: like target)",
    )


def lines(
    title: str,
    counts: Counts,
    draw: Callable[[Axes, Models], Said] | None = None,
    *,
    said: Sequence[Measure] = (),
) -> Panel:
    """A panel of lines over a number of things; `said` are numbers that it gives in words."""
    return Panel(
        title=title,
        measures=(*counts.all, *said),
        draw=draw or (lambda ax, models: side.panel_counts(ax, models, counts)),
        height=lambda models: LINES,
        counts=counts,
    )


@dataclass(frozen=True, kw_only=True)
class Page:
    """A figure or table of the paper with our numbers; panels by letter, or a word where it has none."""

    name: str
    heading: str
    panels: Mapping[str, Panel]
    notes: tuple[str, ...] = ()

    @property
    def measures(self) -> list[Measure]:
        """Every panel's."""
        return [one for panel in self.panels.values() for one in panel.measures]

    @property
    def studies(self) -> tuple[str, ...]:
        """Every panel's."""
        return tuple(dict.fromkeys(study for panel in self.panels.values() for study in panel.studies))

    def only(self, letter: str) -> Page:
        """The page of one panel."""
        return replace(self, name=f"{self.name}{letter}", panels={letter: self.panels[letter]})


def pages() -> dict[str, Page]:
    """Every page and every panel's own, by name."""
    found = [page for source in SOURCES for page in importlib.import_module(f"figures.{source}").PAGES]
    panels = [page.only(letter) for page in found if len(page.panels) > 1 for letter in page.panels]
    return {page.name: page for page in (*found, *panels)}


def whole() -> list[str]:
    """The names of whole pages."""
    return [page.name for source in SOURCES for page in importlib.import_module(f"figures.{source}").PAGES]


def get(name: str) -> Page:
    """A page, or a panel's own. Raises UnknownName with the nearest."""
    known = pages()
    if name not in known:
        raise UnknownName(kind="page", name=name, known=known)
    return known[name]


def models_of(page: Page, records: Mapping[str, Record], *, layout: str, faults: Mapping[str, str]) -> Models:
    """The page's models: those with a record of one of its studies, or with one that cannot be drawn."""
    return side.by_model(records, layout=layout, studies=page.studies, faults=faults)


# --- figure -----------------------------------------------------------------------------------------------


def figure(page: Page, models: Models) -> Figure:
    """The page's panels, one under the other, with their legend and caption."""
    from matplotlib.figure import Figure

    from figures import page as frame
    from figures import style

    heights = [_height(panel, models) for panel in page.panels.values()]
    made = Figure(figsize=(WIDTH, sum(heights)), dpi=style.DPI)
    axes = made.subplots(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    said = sum(
        _panel(ax, letter if len(letter) == 1 else "", panel, models)
        for ax, (letter, panel) in zip(axes, page.panels.items(), strict=True)
    )
    made.set_figheight(sum(heights) + AROUND * len(heights) + SAID * said / 72)
    frame.head(made, page.heading)
    style.add_footer(made, handles=_handles(page, models), columns=2, lines=_lines(page, models))
    return made


def _height(panel: Panel, models: Models) -> float:
    return panel.height(len(models)) if _shows(panel, models) else 0.7


def _shows(panel: Panel, models: Models) -> bool:
    """Whether there is a record to draw it from."""
    return any(study in side.readable(found) for found in models.values() for study in panel.studies)


def _panel(ax: Axes, letter: str, panel: Panel, models: Models) -> int:
    """Draw a panel, or say in it why not; returns how many lines of words stand above it."""
    from figures import style

    said, why = _drawn(ax, panel, models)
    if why:
        nothing(ax, why)
    elif panel.xlabel:
        ax.set_xlabel(panel.xlabel)
    for index, (words, colour) in enumerate(reversed(said)):
        at = (2, 3 + SAID * index)
        look: dict[str, Any] = {"fontsize": 7, "color": style.darker(colour)}
        ax.annotate(words, (0, 1), at, xycoords="axes fraction", textcoords="offset points", **look)
    style.panel_title(ax, letter, panel.title, above=SAID * len(said))
    return len(said)


def _drawn(ax: Axes, panel: Panel, models: Models) -> tuple[Said, str]:
    """What stands above a panel, and why it is not drawn; a record that it cannot draw is left out and named."""
    said, why = _attempted(ax, panel, models)
    if said is None and _shows(panel, models):
        said, why = _attempted(ax, panel, _drawable(panel, models))
    return said or [], why


def _attempted(ax: Axes, panel: Panel, models: Models) -> tuple[Said | None, str]:
    if not _shows(panel, models):
        return None, "\n".join(_why(panel, models))
    said, why = side.attempt(lambda: panel.draw(ax, models), again="make figures")
    if why:
        ax.clear()
    return said, why


def _drawable(panel: Panel, models: Models) -> Models:
    """The models, with why in the place of each record that the panel cannot draw by itself."""
    return {
        model: {study: _alone(panel, model, study, one) for study, one in found.items()}
        for model, found in models.items()
    }


def _alone(panel: Panel, model: str, study: str, record: Record | str) -> Record | str:
    from matplotlib.figure import Figure

    if isinstance(record, str) or study not in panel.studies:
        return record
    ax = Figure().subplots()
    return side.attempt(lambda: panel.draw(ax, {model: {study: record}}), again=f"make probe-{study}")[1] or record


def _why(panel: Panel, models: Models) -> Iterator[str]:
    """Why a panel has nothing to draw."""
    faulty = [
        (model, study, found[study]) for study in panel.studies for model, found in models.items() if study in found
    ]
    for study in panel.studies:
        if not any(study == one for _, one, _ in faulty):
            yield f"no record of {study}: run `make probe-{study}`"
    for model, study, reason in faulty:
        yield f"{study} of {model} is not drawn: {side.in_short(str(reason))}"


def nothing(ax: Axes, words: str) -> None:
    """A panel that says why it shows nothing."""
    from figures import style

    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", style="italic", color=style.GREY)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def _lines(page: Page, models: Models) -> list[str]:
    from figures import style

    return [
        *(line for model, found in models.items() for line in side.captions(model, found, page.studies)),
        f"Pairs that pass the gate; clusters are scenarios. {side.intervals(page.measures, models)}",
        *side.warnings(page.measures, models),
        *page.notes,
        f"Open markers, published: {style.published()['source']}; other models, approximate values, no interval given.",
    ]


def _handles(page: Page, models: Models) -> list[Artist]:
    """The legend: a colour and marker a model, controls, the lines of each panel, the paper's values."""
    from matplotlib.lines import Line2D

    from figures import style

    made: list[Artist] = []
    for index, model in enumerate(models):
        colour, marker = style.model_look(index)
        made.append(Line2D([], [], color=colour, marker=marker, markersize=5, markeredgewidth=0, label=model))
    made.append(Line2D([], [], color=style.lighter(style.GREY), linewidth=2, label="lighter: control or identity"))
    if side.unresolved(page.measures, models):
        grey: dict[str, Any] = {"markerfacecolor": style.PALE, "markeredgecolor": style.GREY}
        words = "grey: unresolved, below the noise floor"
        made.append(Line2D([], [], linestyle="none", marker="o", markersize=5, label=words, **grey))
    for letter, panel in page.panels.items():
        for curve in panel.counts.curves if panel.counts else ():
            words = f"{letter}: {curve.words}".removeprefix(": ")
            made.append(Line2D([], [], color=style.GREY, linestyle=curve.line, linewidth=1.3, label=words))
    for label, marker in _marks(page).items():
        mark = Line2D([], [], linestyle="none", marker=marker, markersize=4.5, label=label)
        mark.set(markerfacecolor="white", markeredgecolor=style.INK)
        made.append(mark)
    return made


def _marks(page: Page) -> dict[str, str]:
    """The markers of the paper's values, by what the legend says of them."""
    found: dict[str, str] = {}
    for letter, panel in page.panels.items():
        counts = panel.counts
        drawn = panel.measures if counts is None else ()
        ends = [low for one in drawn for low, _ in side.paper_values(one).values()]
        if any(low != side.AT_MOST for low in ends):
            found["published"] = "D"
        if side.AT_MOST in ends:
            found["published: at most"] = side.LEFT
        for curve in counts.curves if counts else ():
            words = f"published, {letter}: {curve.words}"
            if counts and counts.papers(curve):
                found[words] = curve.marker
            if counts and counts.bounds(curve):
                found[f"{words}, at most"] = side.DOWN
        found |= panel.marks
    return found


# --- tables -----------------------------------------------------------------------------------------------


def markdown(page: Page, models: Models, *, layout: str) -> str:
    """The page's numbers in Markdown, a row a measure, a column a model, the paper's values in the last; under them
    what each record was made of."""
    text = [
        f"# {page.heading}",
        "",
        f"Layout `{layout}`; pairs that pass the gate, with intervals clustered by scenario. Made by `make figures`.",
        "",
        f"![{page.name}]({page.name}.png)",
    ]
    for letter, panel in page.panels.items():
        title = f"{letter}: {panel.title}" if len(letter) == 1 else panel.title
        head = [_plain(cell) for cell in (title, *models, "published")]
        text += ["", f"| {' | '.join(head)} |", f"|---|{'---|' * (len(models) + 1)}"]
        text += [f"| {' | '.join(_plain(cell) for cell in row)} |" for row in _rows(panel, models)]
    text += ["", "## Notes", "", *(f"- {line}" for line in _lines(page, models))]
    missing = [
        f"- {model}: no record of {', '.join(absent)}"
        for model, found in models.items()
        if (absent := [study for study in page.studies if study not in found])
    ]
    text += ["", "## Records", "", *(f"- {line}" for line in side.origins(models)), *missing, ""]
    return "\n".join(text)


def _rows(panel: Panel, models: Models) -> Iterator[list[str]]:
    for measure in panel.measures:
        cells = [side.cell(measure, found).words for found in models.values()]
        yield [measure.label.replace("\n", " "), *cells, side.paper_words(measure) or "-"]
    if panel.listed:
        yield from panel.listed(models)


def _plain(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def latex(page: Page, models: Models, *, layout: str) -> str:
    """The same table for LaTeX: a `table` of booktabs with the notes under it, to be taken in with \\input."""
    columns = len(models) + 2
    text = [
        "% needs \\usepackage{booktabs} and \\usepackage{graphicx}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_tex(f'{page.heading}. Layout {layout}; pairs that pass the gate, intervals by scenario.')}}}",
        f"\\label{{tab:kvnotes-{page.name}}}",
        "\\resizebox{\\linewidth}{!}{%",
        f"\\begin{{tabular}}{{@{{}}l{'c' * len(models)}l@{{}}}}",
        "\\toprule",
        f"{' & '.join(_tex(cell) for cell in ('', *models, 'published'))} \\\\",
    ]
    for letter, panel in page.panels.items():
        title = f"{letter}: {panel.title}" if len(letter) == 1 else panel.title
        text += ["\\midrule", f"\\multicolumn{{{columns}}}{{@{{}}l}}{{\\textit{{{_tex(title)}}}}} \\\\"]
        text += [f"{' & '.join(_tex(cell) for cell in row)} \\\\" for row in _rows(panel, models)]
    text += ["\\bottomrule", "\\end{tabular}%", "}", "\\par\\medskip", "{\\footnotesize\\raggedright"]
    text += [f"{_tex(line)}\\par" for line in _lines(page, models)]
    return "\n".join([*text, "}", "\\end{table}", ""])


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "[": "{[}",  # at the start of a cell it would be the option of the line break before it
    "\N{MINUS SIGN}": "$-$",
    "\N{DAGGER}": r"\dag{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text)


# --- files ------------------------------------------------------------------------------------------------


def publish(page: Page, models: Models, *, layout: str, out: Path) -> list[Path]:
    """Write the page's figure and tables into `out`; returns the files.

    Raises:
        RecordError: if a file cannot be written.
    """
    from figures import style

    path = out / FOLDER / page.name
    files = style.save(figure(page, models), path)
    for kind, text in (("md", markdown(page, models, layout=layout)), ("tex", latex(page, models, layout=layout))):
        files.append(path.with_name(f"{page.name}.{kind}"))
        write_atomically(text.encode(), files[-1])
    return files
