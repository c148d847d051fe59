"""A record made by hand: every number in it can be worked out on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvnotes.records import (
    Bounded,
    Check,
    Effect,
    Gate,
    HypothesisTest,
    Inclusion,
    Instance,
    Model,
    Provenance,
    Record,
    Summary,
    Table,
    Timings,
    Tokens,
    count_inclusion,
)

Status = Literal["included", "incompetent", "skipped"]
LABELS = {
    "field_only": "field-only",
    "notes_only": "notes-only",
    "full_downstream": "full-downstream",
    "field_share": "field share",
    "interaction": "interaction",
}
CONTROLS = ("full_downstream",)
HALF_WIDTH = 0.08  # of every interval but the identity's


def measured(
    name: str, *, base: float, target: float, measures: Mapping[str, Any], passed: bool = True, **more: Any
) -> Instance:
    """An instance of layout `l`, alone in its scenario, with these margins and measures; `more` sets other fields."""
    gate = Gate(
        base_margin=base,
        target_margin=target,
        gap=target - base,
        base_correct=base < 0,
        target_correct=target > 0,
        base_argmax_correct=True,
        target_argmax_correct=True,
        passed=passed,
    )
    made = Instance(
        id=name,
        scenario=name,
        domain="d",
        layout="l",
        kind="field",
        group=name,
        seed=0,
        balance={},
        status="included" if passed else "incompetent",
        reason=None if passed else "gate",
        tokens=None,
        spans={},
        gate=gate,
        measures=dict(measures),
        hooks={},
        seconds=0.0,
    )
    return made.model_copy(update=more)


def make_record(
    *,
    model: str = "tiny-model",
    recoveries: Mapping[str, tuple[float, float]] | None = None,
    included: int = 4,
    gated: int = 2,
    skipped: int = 1,
    seed: int = 0,
    warning: str | None = None,
) -> Record:
    """A locality record.

    `recoveries` maps each layout to its (field-only, notes-only) recovery; every layout has the same numbers
    of included, gated and skipped instances. Base and target margins are -4 and 4, so a recovery R is a
    margin of 8 R - 4; two instances share a scenario. Ungated estimates are 0.02 lower than gated ones.
    """
    by_layout = {"table_field_first": (0.05, 0.95)} if recoveries is None else dict(recoveries)
    counts: list[tuple[Status, int]] = [("included", included), ("incompetent", gated), ("skipped", skipped)]
    statuses: list[Status] = [status for status, count in counts for _ in range(count)]
    instances = [
        _instance(layout=layout, index=index, status=status, recovery=recovery, seed=seed)
        for layout, recovery in by_layout.items()
        for index, status in enumerate(statuses)
    ]
    effects = [
        effect
        for layout, recovery in by_layout.items()
        for effect in _effects(layout=layout, recovery=recovery, instances=instances, warning=warning)
    ]
    inclusion = count_inclusion(instances)
    return Record(
        study="locality",
        layout="all" if len(by_layout) > 1 else next(iter(by_layout)),
        task="gated",
        title="Locality: where the decision is stored",
        provenance=_provenance(seed=seed),
        model=_model(model),
        inclusion=inclusion,
        instances=tuple(instances),
        summary=_summary(effects, by_layout=by_layout, inclusion=inclusion),
        checks=(
            Check(name="empty_edit", value=0.0, bound=1e-4, passed=True, what="an empty edit equals base"),
            Check(name="identity", value=3e-6, bound=1e-4, passed=True, what="full-downstream equals target"),
        ),
        arrays=(),
        timings=Timings(total_s=61.0, per_instance_s=2.5, load_s=4.0),
    )


def _instance(*, layout: str, index: int, status: Status, recovery: tuple[float, float], seed: int) -> Instance:
    reasons = {"included": None, "incompetent": "gap under 1 logit", "skipped": "values of unequal token count"}
    field, notes = recovery
    measured = status != "skipped"
    return Instance(
        id=f"{layout}/{index:03d}",
        scenario=f"scenario-{index // 2}",
        domain=f"domain-{index // 4}",
        layout=layout,
        kind="field",
        group=f"{layout}/{index:03d}",
        seed=seed,
        balance={"row_order": "permit_first" if index % 2 else "restrict_first"},
        status=status,
        reason=reasons[status],
        tokens=_tokens(index) if measured else None,
        spans={"field": ((2, 3),), "delimiter": ((4, 5), (6, 7))} if measured else {},
        gate=_gate(passed=status == "included") if measured else None,
        measures=_measures(field=field, notes=notes) if measured else {},
        hooks={},
        seconds=2.5,
    )


def _tokens(index: int) -> Tokens:
    return Tokens(
        base=(1, 5, 10 + index, 7, 13, 8, 13, 9),
        target=(1, 5, 50 + index, 7, 13, 8, 13, 9),
        changed=(2,),
        query=(7,),
        base_action=100,
        target_action=101,
    )


def _gate(*, passed: bool) -> Gate:
    half = 4.0 if passed else 0.25
    return Gate(
        base_margin=-half,
        target_margin=half,
        gap=2 * half,
        base_correct=True,
        target_correct=True,
        base_argmax_correct=passed,
        target_argmax_correct=passed,
        passed=passed,
    )


def _measures(*, field: float, notes: float) -> dict[str, float]:
    return {
        "base": -4.0,
        "target": 4.0,
        "field_only": 8 * field - 4,
        "notes_only": 8 * notes - 4,
        "full_downstream": 4.0,
        "R_field_only": field,
        "R_notes_only": notes,
        "R_full_downstream": 1.0,
        "field_share": (field + 1 - notes) / 2,
        "interaction": 1 - field - notes,
    }


def _effects(
    *, layout: str, recovery: tuple[float, float], instances: Sequence[Instance], warning: str | None
) -> list[Effect]:
    field, notes = recovery
    values = {key.removeprefix("R_"): value for key, value in _measures(field=field, notes=notes).items()}
    values |= {"field_only": field, "notes_only": notes, "full_downstream": 1.0}
    here = [one for one in instances if one.layout == layout]
    groups = {
        True: [one for one in here if one.status == "included"],
        False: [one for one in here if one.status != "skipped"],
    }
    return [
        _effect(name=name, layout=layout, gated=gated, value=values[name], of=group, warning=warning)
        for gated, group in groups.items()
        for name in LABELS
    ]


def _effect(
    *, name: str, layout: str, gated: bool, value: float, of: Sequence[Instance], warning: str | None
) -> Effect:
    estimate = None if not of else value - (0 if gated else 0.02) * (name not in CONTROLS)
    half = 1e-4 if name in CONTROLS else HALF_WIDTH
    clusters = len({one.scenario for one in of})
    near_zero = HypothesisTest(
        name="equivalence (TOST)",
        statistic=None,
        p=0.003,
        margin=0.1,
        conclusion="equivalent to 0 within 0.1",
    )
    return Effect(
        name=name,
        label=LABELS[name],
        layout=layout,
        gated=gated,
        estimate=estimate,
        low=None if estimate is None else estimate - half,
        high=None if estimate is None else estimate + half,
        level=0.95,
        method="t, G-1 degrees of freedom",
        n=len(of),
        clusters=clusters,
        mean_of_ratios=None if estimate is None else estimate + 0.01,
        unresolved=False,
        warning=warning,
        test=near_zero if name == "field_only" and gated and estimate is not None else None,
        control=name in CONTROLS,
    )


def _summary(
    effects: Sequence[Effect], *, by_layout: Mapping[str, tuple[float, float]], inclusion: Inclusion
) -> Summary:
    table = Table(columns=("layout", "notes-only"), rows=[[key, pair[1]] for key, pair in by_layout.items()])
    headline = f"{inclusion.included} of {inclusion.generated} pairs included"
    return Summary(effects=tuple(effects), tables={"by layout": table}, notes=("made by hand",), headline=headline)


def _provenance(*, seed: int) -> Provenance:
    return Provenance(
        created="2026-01-02T03:04:05Z",
        command="python -m probes.locality",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=False,
        kvnotes_version="0.1.0",
        python="3.11.7",
        platform="Linux-x86_64",
        versions={"numpy": "2.4.6", "torch": "2.13.0"},
        seed=seed,
        config={"n": 24, "seed": seed, "layout": "table_field_first"},
        config_hash="a1b2c3d4e5f60718",
    )


def _model(name: str) -> Model:
    return Model(
        name=name,
        source="made by hand",
        weights_sha256="0" * 64,
        files_sha256="c" * 64,
        chat={},
        template=("", ""),
        tokenizer_sha256="1" * 64,
        precision="Q4_K_M, dequantised",
        architecture="LlamaForCausalLM",
        layers=2,
        heads=4,
        kv_heads=2,
        d_model=64,
        d_head=16,
        dtype="float32",
        device="cpu",
        attention="eager",
        noise_floor=2.1e-5,
        self_check={"cached decode": Bounded(value=2.1e-5, bound=1e-3, passed=True)},
    )
