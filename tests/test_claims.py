"""The page of claims: verdicts by hand, and that the committed page is what the committed records say."""

from __future__ import annotations

import pytest
from sample_record import make_record

from figures import claims
from figures.claims import Claim, Part
from kvnotes import discover, records
from kvnotes.discover import ROOT
from kvnotes.records import Record, RecordError

STEM = "locality/table_field_first"


@pytest.fixture(scope="module")
def committed() -> dict[str, Record]:
    return records.find(ROOT / "results")


def part(**bounds: float) -> Part:
    return Part(study="locality", effect="field_only", **bounds)  # pyright: ignore[reportArgumentType]


def record(estimate: float | None, *, half: float | None = 0.08) -> Record:
    """A sample record whose gated field-only recovery is `estimate`, give or take `half`."""
    made = make_record(model="m")
    ends = (None, None) if estimate is None or half is None else (estimate - half, estimate + half)
    changed = {
        "estimate": estimate,
        "low": ends[0],
        "high": ends[1],
        "warning": "too few" if estimate is None else None,
    }
    effects = tuple(
        one.model_copy(update=changed) if one.gated and one.name == "field_only" else one
        for one in made.summary.effects
    )
    return made.model_copy(update={"summary": made.summary.model_copy(update={"effects": effects})})


@pytest.mark.parametrize(
    ("estimate", "half", "bounds", "verdict"),
    [
        (0.00, 0.08, {"at_least": -0.1, "at_most": 0.1}, "supported"),
        (0.05, 0.08, {"at_least": -0.1, "at_most": 0.1}, "open"),
        (0.20, 0.08, {"at_least": -0.1, "at_most": 0.1}, "not supported"),
        (0.60, 0.08, {"at_least": 0.5}, "supported"),
        (0.55, 0.08, {"at_least": 0.5}, "open"),
        (0.40, 0.08, {"at_least": 0.5}, "not supported"),
        (0.40, 0.08, {"at_most": 0.5}, "supported"),
        (0.90, None, {"at_least": 0.5}, "open"),  # without an interval nothing is settled
        (None, None, {"at_least": 0.5}, "not reported"),
    ],
)
def test_a_verdict_needs_the_whole_interval(estimate, half, bounds, verdict):
    assert claims.judge(part(**bounds), {STEM: record(estimate, half=half)}).verdict == verdict


def test_a_study_that_was_not_run_and_an_effect_that_is_not_there_are_told_apart():
    assert claims.judge(part(at_least=0.0), {}).words == "not measured"
    missing = Part(study="locality", effect="made_up", at_least=0.0)
    assert claims.judge(missing, {STEM: record(0.0)}).words == "not reported: no such effect"
    few = claims.judge(part(at_least=0.0), {STEM: record(None)})
    assert few.words == "not reported: too few"


def test_the_weakest_part_is_the_claims():
    held = {0.0: "supported", 0.05: "open", 0.4: "not supported"}
    judged = {value: claims.judge(part(at_least=-0.1, at_most=0.1), {STEM: record(value)}) for value in held}
    assert {value: one.verdict for value, one in judged.items()} == held
    assert claims.conclude([judged[0.0], judged[0.05]]) == "open"
    assert claims.conclude([judged[0.0], judged[0.4], judged[0.05]]) == "not supported"
    assert claims.conclude([judged[0.0], claims.judge(part(at_least=0.0), {})]) == "not measured"


def test_the_page_has_a_column_a_model_and_none_for_planted_ones():
    claim = Claim(claim="It holds.", section="section 3", paper="0.1", parts=(part(at_least=-0.1, at_most=0.1),))
    planted = record(0.0).model_copy(update={"task": "planted"})
    found = {f"m/{STEM}": record(0.0), f"n/{STEM}": record(0.4), f"planted-notes/{STEM}": planted}
    lines = claims.page(found, [claim]).splitlines()
    assert "|  | claim | m | n |" in lines
    assert "| 1 | It holds. | supported | not supported |" in lines
    words = "0.00 [-0.08, 0.08], n=4: supported | 0.40 [0.32, 0.48], n=4: not supported"
    assert f"| `locality` field_only | at least -0.1 and at most 0.1 | {words} |" in lines


def test_without_records_there_is_no_page():
    with pytest.raises(RecordError, match="make probe-locality"):
        claims.page({}, claims.read())


def test_the_committed_page_is_what_the_committed_records_say(committed):
    made = claims.page(committed, claims.read())
    assert (ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == made, "run `make claims`"


def test_every_claim_names_a_study_and_an_effect_that_its_records_have(committed):
    """A misspelt effect would read as not reported for ever."""
    found = claims.by_model(committed)
    every = [one for claim in claims.read() for one in claim.parts]
    assert {one.study for one in every} <= set(discover.studies())
    for one in every:
        for model, own in found.items():
            assert "no such effect" not in claims.judge(one, own).words, (model, one.study, one.effect)
