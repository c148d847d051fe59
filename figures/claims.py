"""What the records say of the paper's claims: `python -m figures.claims RESULTS --out docs/claims.md`.

`claims.yaml` states each claim and the bounds that our numbers must keep. A claim is supported where every effect's
whole interval lies within its bounds, not supported where one lies outside them altogether, and open in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml
from pydantic import BaseModel, ConfigDict

from figures import side
from kvnotes.commandline import guard
from kvnotes.config import defaults
from kvnotes.records import Effect, Record, RecordError, find, write_atomically

CLAIMS = Path(__file__).with_name("claims.yaml")
OUT = Path("docs/claims.md")

Verdict = Literal["supported", "not supported", "open", "not measured", "not reported"]
# The worst of a claim's parts is the claim's: what fails fails it, and what is missing leaves it undecided.
ORDER: tuple[Verdict, ...] = ("not supported", "not measured", "not reported", "open", "supported")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Frozen):
    """An effect of a study's record, over the pairs that pass the gate, and the bounds of its interval."""

    study: str
    effect: str
    record: str = ""
    """The record's layout; the study's default one where empty."""
    layout: str = ""
    """One of several layouts of a record; the record's own where empty."""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bounds(self) -> str:
        """In words."""
        ends = {"at least": self.at_least, "at most": self.at_most}
        return " and ".join(f"{name} {end:g}" for name, end in ends.items() if end is not None)


class Claim(_Frozen):
    """What the paper says, where, with which numbers, and what ours must be."""

    claim: str
    section: str
    paper: str
    parts: tuple[Part, ...]


class Judged(_Frozen):
    """A part held against one model's record."""

    verdict: Verdict
    words: str


def read(path: Path = CLAIMS) -> tuple[Claim, ...]:
    """The claims as data."""
    return tuple(Claim(**one) for one in yaml.safe_load(path.read_text(encoding="utf-8")))


# --- verdicts ---------------------------------------------------------------------------------------------


def judge(part: Part, records: Mapping[str, Record]) -> Judged:
    """A part's verdict and number by one model's records, which have the names of `kvnotes.records.find` without the
    model; of several records that could stand for the study, the one that the pages of figures show."""
    layout = part.record or defaults(part.study)["layout"]
    chosen = side.stands_for(records, study=part.study, layout=layout)
    if chosen is None:
        return Judged(verdict="not measured", words="not measured")
    name, record = chosen
    effect = _effect(part, record)
    if effect is None or effect.estimate is None:
        why = "no such effect" if effect is None else effect.warning or "no estimate"
        return Judged(verdict="not reported", words=f"not reported: {why}")
    others = {} if side.own_settings(name, record) else side.unusual(record)
    said = "".join(f", {key} {value}" for key, value in others.items())
    return Judged(verdict=_verdict(part, effect), words=f"{_number(effect)}{said}")


def _effect(part: Part, record: Record) -> Effect | None:
    layout = part.layout or record.layout
    found = (one for one in record.summary.effects if one.gated and one.name == part.effect and one.layout == layout)
    return next(found, None)


def _verdict(part: Part, effect: Effect) -> Verdict:
    if effect.low is None or effect.high is None:
        return "open"
    least = -math.inf if part.at_least is None else part.at_least
    most = math.inf if part.at_most is None else part.at_most
    if least <= effect.low and effect.high <= most:
        return "supported"
    return "not supported" if effect.high < least or effect.low > most else "open"


def _number(effect: Effect) -> str:
    ends = None if effect.low is None or effect.high is None else f" [{_two(effect.low)}, {_two(effect.high)}]"
    return f"{_two(effect.estimate)}{ends or ', no interval'}, n={effect.n}"


def _two(value: float | None) -> str:
    """To two digits; a rounded minus zero is zero."""
    return "-" if value is None else f"{round(value, 2) + 0.0:.2f}"


def conclude(parts: Sequence[Judged]) -> Verdict:
    """A claim's verdict: the first in `ORDER` that one of its parts has."""
    found = {one.verdict for one in parts}
    return next(verdict for verdict in ORDER if verdict in found)


# --- page -------------------------------------------------------------------------------------------------

HEAD = """# What the committed records say of the paper's claims

*Models Take Notes at Prefill* (arXiv 2606.17107) measures models of 4 to 9 billion parameters; the records here are of
small ones. Made from the records by `make claims`; a test holds this page to them.

**supported**: the whole interval of every number lies within its bounds. **not supported**: one lies outside them
altogether. **open**: neither. The bounds are our reading of the words; `figures/claims.yaml` states them. Pairs that
pass the competence gate, intervals clustered by scenario. What is chosen was chosen on other scenarios, where the
paper's best positions, heads and features are in-sample; it is measured with other prompts. A claim that is not
supported here is not refuted there.
"""


def page(records: Mapping[str, Record], claims: Sequence[Claim]) -> str:
    """The claims in Markdown: verdicts by model in one table, then each claim with its numbers.

    Raises RecordError where there is no record at all.
    """
    models = by_model(records)
    if not models:
        raise RecordError("no records to hold the claims against; run a study, such as `make probe-locality`")
    return "\n".join([HEAD, *_overview(models, claims), "", *_details(models, claims)]) + "\n"


def by_model(records: Mapping[str, Record]) -> dict[str, dict[str, Record]]:
    """Records by model and by the rest of their name; of planted models none, whose mechanism is no finding."""
    found: dict[str, dict[str, Record]] = {}
    for name, record in sorted(records.items()):
        model, _, rest = name.partition("/")
        if record.task != "planted":
            found.setdefault(model, {})[rest] = record
    return found


def _overview(models: Mapping[str, Mapping[str, Record]], claims: Sequence[Claim]) -> Iterator[str]:
    yield _row(["", "claim", *models])
    yield "|---|---|" + "---|" * len(models)
    for number, claim in enumerate(claims, start=1):
        verdicts = (conclude([judge(part, found) for part in claim.parts]) for found in models.values())
        yield _row([f"{number}", claim.claim, *verdicts])


def _details(models: Mapping[str, Mapping[str, Record]], claims: Sequence[Claim]) -> Iterator[str]:
    for number, claim in enumerate(claims, start=1):
        yield f"## {number}. {claim.claim}"
        yield f"\nPaper, {claim.section}: {claim.paper}.\n"
        yield _row(["effect", "must be", *models])
        yield "|---|---|" + "---|" * len(models)
        for part in claim.parts:
            where = f" ({part.layout})" if part.layout else ""
            numbers = (judge(part, found) for found in models.values())
            cells = (one.words if one.verdict in one.words else f"{one.words}: {one.verdict}" for one in numbers)
            yield _row([f"`{part.study}` {part.effect}{where}", part.bounds, *cells])
        yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- command ----------------------------------------------------------------------------------------------


@app.command()
def build(
    results: Annotated[Path, typer.Argument(help="Folder of records.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page.")] = OUT,
) -> None:
    """Hold the claims against the records under RESULTS and write the page."""
    write_atomically(page(find(results), read()).encode(), out)
    typer.echo(out)


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    guard(app)


if __name__ == "__main__":
    main()
