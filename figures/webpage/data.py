"""What the page says of each model: its headline effects, and a sentence where there is nothing to show. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from figures import build, style
from kvnotes import discover, effects, records
from kvnotes.records import Effect, Record, RecordError

# In the order of the README's table of studies; with what the headline of a study is about whose module does not say it
# as HEADLINE.
STUDIES: Mapping[str, tuple[str, ...]] = {
    "locality": ("field_only", "notes_only", "field_share"),
    "suffix": (),
    "specificity": (),
    "knockout": ("resample_8", "random_resample_8", "area_resample"),
    "dissociation": ("trigger_only", "notes", "other_field", "same_conclusion"),
    "injection": ("full_notes", "follow_rate", "flips_top_8", "smallest", "foreign_conclusion"),
    "linear": ("auc_aggregator", "auc_answer_prefix", "auc_decision", "rule_auc_aggregator"),
    "timing": ("write_depth", "read_depth", "commit_depth", "read_minus_write"),
    "heads": (),
    "direction": (),
    "attribution": (),
    "scrubbing": (),
    "sae": (),
    "wording": ("p_two_uncorrected", "p_two_bare_value", "p_two_state_update", "p_two_old_value"),
}
FIRST = 4  # effects of a study that is not among them


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A model's records by name (`<folder>/<study>/<file stem>`), and by name why others cannot be read."""

    folder: str
    records: Mapping[str, Record] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model's name; its folder's where no record can be read."""
        return next((one.model.name for one in self.records.values()), self.folder)

    @cached_property
    def undrawn(self) -> dict[str, str]:
        """By name, why a record is not to be drawn: it cannot be read, a check failed, or it is in another's folder."""
        return {**self.faults, **build.all_failed(self.records)}

    @property
    def drawable(self) -> dict[str, Record]:
        """The records that are to be drawn."""
        return {name: one for name, one in self.records.items() if name not in self.undrawn}

    @property
    def planted(self) -> bool:
        """Whether its mechanism was set by hand."""
        return any(one.model.source.startswith("kvnotes.planted") for one in self.records.values())


@dataclass(frozen=True, kw_only=True)
class Row:
    """An effect as words; `said` stands in its place where there is none."""

    layout: str = ""
    label: str = ""
    estimate: str = ""
    interval: str = ""
    n: str = ""
    test: str = ""
    control: bool = False
    unresolved: bool = False
    warning: str = ""
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A record in the summary, or the sentence about one that is missing or cannot be read."""

    study: str
    name: str
    title: str = ""
    rows: Sequence[Row] = ()
    said: Sequence[str] = ()


def load(results: Path, models: Sequence[str] = ()) -> list[Shelf]:
    """The records under `results` by model, of all or of some in their order; a model asked for may have none.

    Raises:
        RecordError: if the folder does not exist, or holds no record and no model is asked for.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in records.record_files(results):
        name = records.record_name(path)
        found.setdefault(name.split("/")[0], {})[name] = path
    folders = list(dict.fromkeys(map(_folder, models))) or sorted(found, key=lambda name: ("planted-" in name, name))
    if not folders:
        raise RecordError(f"{results} holds no record; `make probe-locality` makes one.")
    return [_shelf(folder, found.get(folder, {})) for folder in folders]


def _folder(model: str) -> str:
    from kvnotes.weights import run_name  # a model may be asked for as a run would be, by a hub's name or a folder

    return records.safe_name(run_name(model))


def _shelf(folder: str, paths: Mapping[str, Path]) -> Shelf:
    read: dict[str, Record] = {}
    faults: dict[str, str] = {}
    for name, path in paths.items():
        try:
            read[name] = records.read(path)
        except RecordError as error:
            faults[name] = str(error).removeprefix(f"{path}: ")
    return Shelf(folder=folder, records=read, faults=faults)


def studies() -> list[str]:
    """All studies, those of `STUDIES` first and in its order."""
    known = discover.studies()
    return [*(name for name in STUDIES if name in known), *(name for name in known if name not in STUDIES)]


def headline(study: str) -> tuple[str, ...]:
    """The effects that a study's headline is about: its module says them, or `STUDIES` does."""
    known = discover.study(study) if study in discover.studies() else None
    return tuple(getattr(known, "HEADLINE", ())) or STUDIES.get(study, ())


def summary(shelf: Shelf) -> list[Entry]:
    """An entry a record, in the order of the studies; a study without any has one that says how to run it."""
    return [entry for study in studies() for entry in _of_study(shelf, study)]


def _of_study(shelf: Shelf, study: str) -> Iterator[Entry]:
    here = [name for name in sorted({*shelf.records, *shelf.faults}) if name.split("/")[1] == study]
    for name in here:
        if name in shelf.records:
            record = shelf.records[name]
            said = [*sentences(record), *_untrusted(shelf.undrawn.get(name, ""))]
            yield Entry(study=study, name=name, title=record.title, rows=list(_rows(record)), said=said)
        else:
            yield Entry(study=study, name=name, said=[f"This record cannot be read: {shelf.faults[name]}"])
    if not here:
        yield Entry(study=study, name="", said=[f"No record: run `make probe-{study} MODEL={shelf.model}`."])


def sentences(record: Record) -> Iterator[str]:
    """What a reader must know before its numbers: that no pair passes the gate."""
    counts = record.inclusion
    if not counts.included:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in counts.excluded.items())
        yield (
            f"No pair passes the competence gate, of {counts.used} used and {counts.generated} generated, so there is "
            f"no recovery to report. {reasons}."
        )


def _untrusted(reason: str) -> Iterator[str]:
    if reason:
        yield f"These numbers cannot be trusted: {reason}."


def _rows(record: Record) -> Iterator[Row]:
    if not record.inclusion.included:
        return
    for layout in effects.layouts(record.instances):
        here = {one.name: one for one in record.summary.effects if one.gated and one.layout == layout}
        names = [name for name in headline(record.study) if name in here] or list(here)[:FIRST]
        known = [here[name] for name in names]
        reported = [one for one in known if one.estimate is not None]
        if known and not reported:
            yield Row(layout=layout, said=f"Not reported: {known[0].warning or 'it has no value'}.")
        else:
            yield from (_row(one) for one in known)


def _row(one: Effect) -> Row:
    if one.estimate is None:
        return Row(layout=one.layout, label=one.label, said=f"Not reported: {one.warning or 'it has no value'}.")
    ends = "no interval"
    if one.low is not None and one.high is not None:
        ends = f"[{style.number(one.low)}, {style.number(one.high)}]"
    return Row(
        layout=one.layout,
        label=one.label,
        estimate=style.number(one.estimate),
        interval=ends,
        n=f"{one.n} ({one.clusters})",
        test="" if one.test is None else f"{one.test.conclusion} ({one.test.name})",
        control=one.control,
        unresolved=one.unresolved,
        warning=one.warning or "",
    )


def facts(shelf: Shelf) -> str:
    """The model in a line, from its first record."""
    record = next(iter(shelf.records.values()), None)
    if record is None:
        return ""
    model = record.model
    return (
        f"{model.architecture}, {model.precision}, {model.dtype} on {model.device}; {model.layers} layers, "
        f"{model.heads} heads over {model.kv_heads} KV heads; noise floor "
        f"{'unknown' if model.noise_floor is None else f'{model.noise_floor:.1g} logits'}."
    )
