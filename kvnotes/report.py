"""A record, or what differs between two, printed for people. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvnotes.records import Effect, Instance, Record, content_hash

if TYPE_CHECKING:
    from kvnotes.listing import Listed
    from kvnotes.verify import Finding, Verdict

GOOD, BAD, DIM, HEAD = "green", "bold red", "dim", "bold"
_PIPE_WIDTH = 130  # columns where the output is no terminal


def console() -> Console:
    """A console that prints text as it is: brackets in a record are not markup."""
    plain = Console(markup=False, highlight=False)
    return plain if plain.is_terminal else Console(markup=False, highlight=False, width=_PIPE_WIDTH)


# --- one record ---------------------------------------------------------------------------------------------


def show(record: Record, out: Console) -> None:
    """Print model, inclusion, effects with intervals, controls, tests, checks, timings and provenance."""
    out.print(Text(f"{record.title}  ({record.study}, layout {record.layout}, task {record.task})", style=HEAD))
    if record.summary.headline:
        out.print(record.summary.headline)
    out.print()
    out.print(_facts(record))
    effects = record.summary.effects
    findings = [effect for effect in effects if not effect.control]
    controls = [effect for effect in effects if effect.control]
    tested = [effect for effect in effects if effect.test is not None]
    for title, group in (("Effects", findings), ("Controls", controls)):
        if group:
            out.print(_effects_table(title, group))
            out.print(Text(_interval_line(group), style=DIM))
    for warning in dict.fromkeys(effect.warning for effect in effects if effect.warning):
        out.print(Text(f"warning: {warning}", style="yellow"))
    if tested:
        out.print(_tests_table(tested))
    out.print(_checks_table(record))
    for name, table in record.summary.tables.items():
        out.print(_plain_table(name, table.columns, [[_cell(cell) for cell in row] for row in table.rows]))
    for note in record.summary.notes:
        out.print(f"- {note}")
    out.print(Text(_provenance_line(record), style=DIM))


def overview(records: Mapping[str, Record], out: Console) -> None:
    """Print a line a study: the newest record of each study and model, what it includes, took and says."""
    newest: dict[tuple[str, str], tuple[str, Record]] = {}
    for name, record in sorted(records.items(), key=lambda item: item[1].provenance.created):
        newest[record.model.name, record.study] = name, record
    rows = [
        (
            name,
            f"{record.inclusion.included} of {record.inclusion.generated}",
            str(record.inclusion.scenarios),
            f"{record.timings.total_s:.0f}",
            record.summary.headline,
        )
        for _, (name, record) in sorted(newest.items())
    ]
    out.print(_plain_table("The studies' newest records", ("record", "pairs", "scenarios", "s", "result"), rows))


def listing(found: Sequence[Listed], out: Console) -> None:
    """Print a line a record, and under them why some are not current."""
    table = _table("Records", ())
    for name in ("model", "study", "layout", "date", "pairs", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("result")
    for one in found:
        state = Text(one.state, style=GOOD if one.state == "current" else BAD)
        result = Text(one.headline, no_wrap=True, overflow="ellipsis")  # `show` prints the whole of it
        table.add_row(one.model, one.study, one.layout, one.date, one.pairs, state, result)
    out.print(table)
    for one in found:
        for reason in one.reasons:
            out.print(f"{one.name}: {one.state}: {reason}", soft_wrap=True)


def verdict(found: Verdict, out: Console) -> None:
    """Print whether a record holds, and every part of it that does not or that could not be checked; "partly" where its
    summary is such a part."""
    wrong = any(finding.state in ("wrong", "unreadable") for finding in found.findings)
    partly = any(finding.state == "unchecked" and finding.fatal for finding in found.findings)
    said = Text("FAIL ", style=BAD) if wrong else Text("partly ", style=BAD) if partly else Text("holds ", style=GOOD)
    out.print(said.append(str(found.path), style=""), soft_wrap=True)
    for finding in found.findings:
        _print_finding(finding, out)


def contradictions(found: Sequence[tuple[Path, Finding]], out: Console) -> None:
    """Print what several records contradict each other in."""
    for path, finding in found:
        out.print(Text("FAIL ", style=BAD).append(str(path), style=""), soft_wrap=True)
        _print_finding(finding, out)


def _print_finding(finding: Finding, out: Console) -> None:
    words = "not checked: " if finding.state == "unchecked" else ""
    out.print(f"  {finding.part}: {words}{finding.what}", soft_wrap=True, style=DIM if words else "")


def _facts(record: Record) -> Table:
    model, inclusion = record.model, record.inclusion
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=HEAD)
    grid.add_column(overflow="fold")
    grid.add_row("model", f"{model.name} ({model.architecture}), {model.precision}, from {model.source}")
    grid.add_row(
        "",
        f"{model.layers} layers, {model.heads} heads over {model.kv_heads} KV heads, "
        f"d_model {model.d_model}; {model.dtype} on {model.device}, {model.attention} attention",
    )
    grid.add_row("noise floor", f"{_small(model.noise_floor)} logits (cached decode against the full forward)")
    grid.add_row(
        "pairs",
        f"{inclusion.generated} generated, {inclusion.used} used, {inclusion.included} included "
        f"in {inclusion.scenarios} scenarios",
    )
    if inclusion.excluded:
        reasons = (f"{reason} ({count})" for reason, count in inclusion.excluded.items())
        grid.add_row("excluded", ", ".join(reasons))
    times = record.timings
    each = "" if times.per_instance_s is None else f", {times.per_instance_s:.2f} s a pair"
    grid.add_row("time", f"{times.total_s:.1f} s in all, {times.load_s:.1f} s to load the model{each}")
    return grid


def _effects_table(title: str, effects: Sequence[Effect]) -> Table:
    """What the gate lets through and all used pairs under each other, by layout and effect."""
    table = _table(title, ("layout", "effect", "pairs"))
    for name in ("n (scen.)", "estimate [interval]", "mean of ratios"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    layout = None
    for (here, _), group in _by_layout_and_name(effects).items():
        if layout not in (None, here):
            table.add_section()
        for index, effect in enumerate(sorted(group, key=lambda one: not one.gated)):
            table.add_row(
                "" if layout == here else here,
                "" if index else effect.label,
                _pairs(effect),
                f"{effect.n} ({effect.clusters})",
                _with_interval(effect),
                _number(effect.mean_of_ratios),
                Text("unresolved: under the noise floor", style="yellow") if effect.unresolved else "",
                style="" if effect.gated else DIM,
            )
            layout = here
    return table


def _by_layout_and_name(effects: Iterable[Effect]) -> dict[tuple[str, str], list[Effect]]:
    """Effects by layout, in the order in which layouts first occur, then by name."""
    layouts: dict[str, dict[str, list[Effect]]] = {}
    for effect in effects:
        layouts.setdefault(effect.layout, {}).setdefault(effect.name, []).append(effect)
    return {(layout, name): group for layout, names in layouts.items() for name, group in names.items()}


def _pairs(effect: Effect) -> str:
    return "gated" if effect.gated else "ungated"


def _interval_line(effects: Sequence[Effect]) -> str:
    kinds = dict.fromkeys(f"{effect.level:.0%} {effect.method}" for effect in effects)
    return f"intervals: {'; '.join(kinds)}"


def _tests_table(effects: Sequence[Effect]) -> Table:
    table = _table("Tests", ("layout", "effect", "pairs", "test"))
    for name in ("margin", "p"):
        table.add_column(name, justify="right")
    table.add_column("conclusion")
    for effect in effects:
        test = effect.test
        if test is not None:
            numbers = (_number(test.margin), _p(test.p))
            table.add_row(effect.layout, effect.label, _pairs(effect), test.name, *numbers, test.conclusion)
    return table


def _checks_table(record: Record) -> Table:
    table = _table("Checks", ("check", "what holds"))
    for name in ("value", "bound"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for check in record.checks:
        row = (check.name, check.what, _small(check.value), _small(check.bound))
        table.add_row(*row, _verdict(check.passed))
    for name, measured in record.model.self_check.items():
        row = (name, "the model's self-check at load", _small(measured.value), _small(measured.bound))
        table.add_row(*row, _verdict(measured.passed))
    return table


def _verdict(passed: bool) -> Text:
    return Text("pass", style=GOOD) if passed else Text("FAIL", style=BAD)


def _provenance_line(record: Record) -> str:
    made = record.provenance
    commit = (made.git_commit or "unknown")[:12] + (" with local changes" if made.git_dirty else "")
    packages = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    hashes = f"config {made.config_hash[:8]} | content {record.content_hash[:12]}"
    python = f"kvnotes {made.kvnotes_version}, python {made.python} on {made.platform}"
    first = f"seed {made.seed} | commit {commit} | {hashes} | {made.created}"
    return f"{first}\n{made.command}\n{python}, {packages}"


# --- two records --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Change:
    """A named value in each of two records; None where a record lacks it."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class EffectChange:
    """One effect in both records; `overlap` is None where an interval is missing."""

    layout: str
    label: str
    gated: bool
    a: Effect | None
    b: Effect | None
    difference: float | None
    overlap: bool | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs between two records, timings aside."""

    equal: bool
    facts: tuple[Change, ...]
    effects: tuple[EffectChange, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    common: int
    statuses: tuple[Change, ...]
    tokens: tuple[str, ...]
    largest: Change | None
    other: tuple[str, ...]


def compare(a: Record, b: Record) -> Difference:
    """Compare two records; they are equal when their content hashes are. Instances are matched by id."""
    left, right = ({one.id: one for one in record.instances} for record in (a, b))
    common = [name for name in left if name in right]
    pairs = [(left[name], right[name]) for name in common]
    return Difference(
        equal=content_hash(a) == content_hash(b),
        facts=tuple(_changes(_fact_values(a), _fact_values(b))),
        effects=tuple(_effect_changes(a, b)),
        only_a=tuple(name for name in left if name not in right),
        only_b=tuple(name for name in right if name not in left),
        common=len(common),
        statuses=tuple(Change(name=x.id, a=x.status, b=y.status) for x, y in pairs if x.status != y.status),
        tokens=tuple(x.id for x, y in pairs if x.tokens != y.tokens),
        largest=_largest_change(pairs),
        other=tuple(_other_parts(a, b)),
    )


def show_difference(difference: Difference, out: Console) -> None:
    """Print what `compare` found."""
    if difference.equal:
        out.print(Text("equal: the same content, timings aside", style=GOOD))
        return
    out.print(Text("the records differ", style=BAD))
    if difference.facts:
        rows = [[change.name, _cell(change.a), _cell(change.b)] for change in difference.facts]
        out.print(_plain_table("Settings, model and inclusion", ("what", "A", "B"), rows))
    if difference.effects:
        out.print(_effect_changes_table(difference.effects))
    out.print(
        f"instances: {difference.common} in both, {len(difference.only_a)} only in A, "
        f"{len(difference.only_b)} only in B, {len(difference.statuses)} with another status, "
        f"{len(difference.tokens)} with other tokens"
    )
    for change in difference.statuses:
        out.print(f"  {change.name}: {change.a} -> {change.b}")
    if difference.largest is not None:
        change = difference.largest
        out.print(f"largest change of a measure: {change.name}: {_number(change.a)} -> {_number(change.b)}")
    if difference.other:
        out.print(f"also different: {', '.join(difference.other)}")


def _fact_values(record: Record) -> dict[str, Any]:
    """Everything about a run but its numbers, by a dotted name."""
    made = record.provenance.model_dump(mode="json", exclude={"created", "command"})
    facts = {key: getattr(record, key) for key in ("study", "layout", "task")}
    facts |= _flat("config", made.pop("config")) | _flat("provenance", made)
    facts |= _flat("model", record.model.model_dump(mode="json"))
    return facts | _flat("inclusion", record.inclusion.model_dump(mode="json"))


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {key: item for part in value for key, item in _flat(f"{name}.{part}", value[part]).items()}
    if isinstance(value, list | tuple):
        return {key: item for i, part in enumerate(value) for key, item in _flat(f"{name}.{i}", part).items()}
    return {name: value}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            yield Change(name=name, a=a.get(name), b=b.get(name))


def _effect_changes(a: Record, b: Record) -> Iterator[EffectChange]:
    left, right = ({(e.layout, e.name, e.gated): e for e in record.summary.effects} for record in (a, b))
    for key in dict.fromkeys((*left, *right)):
        x, y = left.get(key), right.get(key)
        if x == y:
            continue
        shown = x or y
        yield EffectChange(
            layout=key[0],
            label=shown.label if shown else key[1],
            gated=key[2],
            a=x,
            b=y,
            difference=_minus(y and y.estimate, x and x.estimate),
            overlap=_overlap(x, y),
        )


def _minus(b: float | None, a: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _overlap(a: Effect | None, b: Effect | None) -> bool | None:
    if a is None or b is None or a.low is None or a.high is None or b.low is None or b.high is None:
        return None
    return a.low <= b.high and b.low <= a.high


def _largest_change(pairs: Iterable[tuple[Instance, Instance]]) -> Change | None:
    largest, found = 0.0, None
    for x, y in pairs:
        left, right = (_flat(one.id, dict(one.measures)) for one in (x, y))
        for name in (key for key in left if key in right):  # in the order of A: of equal changes the first
            a, b = left[name], right[name]
            if isinstance(a, int | float) and isinstance(b, int | float) and abs(b - a) > largest:
                largest, found = abs(b - a), Change(name=name, a=a, b=b)
    return found


def _other_parts(a: Record, b: Record) -> Iterator[str]:
    """Parts that the rest of a Difference does not cover."""
    for name in ("title", "plan", "checks", "arrays", "vocabulary"):
        if getattr(a, name) != getattr(b, name):
            yield name
    for name in ("tables", "notes", "headline"):
        if getattr(a.summary, name) != getattr(b.summary, name):
            yield f"summary.{name}"
    compared = {"status", "tokens", "measures", "seconds"}
    left, right = ({one.id: one.model_dump(exclude=compared) for one in record.instances} for record in (a, b))
    if any(left[name] != right[name] for name in left.keys() & right.keys()):
        yield "gate, spans or other data of instances"


def _effect_changes_table(changes: Sequence[EffectChange]) -> Table:
    table = _table("Effects", ("layout", "effect"))
    for name in ("A [interval]", "B [interval]", "B - A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("intervals")
    words = {True: "overlap", False: "do not overlap", None: "-"}
    for change in changes:
        table.add_row(
            change.layout,
            f"{change.label}{'' if change.gated else ' (ungated)'}",
            _with_interval(change.a),
            _with_interval(change.b),
            _number(change.difference, sign=True),
            words[change.overlap],
        )
    return table


# --- cells --------------------------------------------------------------------------------------------------


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style=HEAD, header_style="", pad_edge=False, box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plain_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = _table(title, columns)
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text.replace("-0.000", "0.000")


def _with_interval(effect: Effect | None) -> str:
    if effect is None or effect.estimate is None:
        return "-"
    if effect.low is None or effect.high is None:
        return f"{_number(effect.estimate)} [no interval]"
    return f"{_number(effect.estimate)} [{_number(effect.low)}, {_number(effect.high)}]"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
