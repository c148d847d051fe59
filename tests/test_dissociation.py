"""The dissociation study: planted answers, an independent loop in plain transformers, and its summary by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from sample_record import make_record, measured

from kvnotes import config as configs
from kvnotes import donors, effects, models, runner
from kvnotes.config import RunConfig
from kvnotes.instance import Arm, Pair, Piece, TokenPair
from kvnotes.planted import PLANTED
from kvnotes.records import Instance
from kvnotes.sweep import Trial
from probes import dissociation
from tests import tiny
from tests.test_prompts import tokenise

OTHER = {"open": "shut", "shut": "open"}


def config(tmp_path, **flags) -> RunConfig:
    return configs.make(RunConfig, study="dissociation", flags={"results": tmp_path, "resamples": 500, **flags})


def arm(field: str, first: str) -> Arm:
    """`first` is the value of the rule that allows; the other value's rule denies."""
    action = "allow" if field == first else "deny"
    return Arm(
        user=(
            Piece(text="the state is ", role="text"),
            Piece(text=field, role="field"),
            Piece(text=" . if ", role="text"),
            Piece(text=first, role="trigger", key="first"),
            Piece(text=" then allow ; if ", role="text"),
            Piece(text=OTHER[first], role="trigger", key="second"),
            Piece(text=" then deny ; ", role="text"),
            Piece(text="what to do ", role="request"),
        ),
        answer=(Piece(text="answer :", role="answer_prefix"),),
        action=f" {action}",
        field=field,
    )


def square(field: str) -> TokenPair:
    """One pair of the 2x2 design: the rule inverts, the field stays."""
    made = tokenise(
        Pair(
            id=f"p-{field}",
            kind="polarity",
            task="t",
            layout="l",
            scenario="s",
            domain="d",
            group="g",
            seed=0,
            base=arm(field, "open"),
            target=arm(field, "shut"),
        )
    )
    assert isinstance(made, TokenPair)
    return made


@pytest.mark.parametrize("model", ["planted-notes", "planted-direct", "planted-mixed-gqa", "planted-and"])
@pytest.mark.parametrize("layout", ["words_field_first", "words_rules_first"])
def test_planted_models_give_the_planted_recoveries(model, layout, tmp_path):
    record = runner.execute(dissociation, config(tmp_path, model=model, task="planted", layout=layout, n=12))
    assert record.inclusion.included == 12
    measured = {effect.name: effect.estimate for effect in record.summary.effects if effect.gated}
    expected = PLANTED[model].expected["dissociation"]
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, abs=1e-3), name
    assert measured["other_field"] == pytest.approx(expected["notes"], abs=1e-3)  # notes hold the conclusion only
    assert measured["same_conclusion"] == pytest.approx(0, abs=1e-3)
    assert measured["both"] == pytest.approx(1, abs=1e-3)
    assert all(check.passed for check in record.checks)
    assert all("same_conclusion" in one.measures["margins"] for one in record.instances)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_a_plain_transformers_loop(kind, tmp_path):
    """The same cells copied by hand between Hugging Face caches, decoded by the model before any bridge."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair, other = square("open"), square("shut")
    # 4 FIELD 5 . 6 if 7 A 8 then 9 allow 10 ; 11 if 12 B 13 then 14 deny 15 ; 16 what 17 to 18 do 19 answer 20 :
    notes = (8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19)
    expected = {
        "trigger_only": by_hand(plain, pair, pair.base_ids, pair.target_ids, (7, 12)),
        "notes": by_hand(plain, pair, pair.base_ids, pair.target_ids, notes),
        "both": by_hand(plain, pair, pair.base_ids, pair.target_ids, (7, 12, *notes)),
        "target_trigger_from_base": by_hand(plain, pair, pair.target_ids, pair.base_ids, (7, 12)),
        "target_notes_from_base": by_hand(plain, pair, pair.target_ids, pair.base_ids, notes),
        # open under "open allows" and shut under "shut allows" both conclude allow
        "same_conclusion": by_hand(plain, pair, pair.base_ids, other.target_ids, notes),
        "other_field": by_hand(plain, pair, pair.base_ids, other.base_ids, notes),
    }
    model = models.load(str(folder), device="cpu", dtype="float32")
    trial = Trial.run(model, pair, engine="rows", budget=10**7)
    measured = dissociation.measure(trial, config(tmp_path), donors=[donors.fill(model, other)])["margins"]
    assert measured == pytest.approx(expected, abs=1e-4)
    assert max(dissociation.identities(trial, {"margins": measured}).values()) < 1e-5
    assert len({round(value, 4) for value in expected.values()}) == 5  # two pairs of mirror images


def by_hand(plain, pair, into, donor, positions) -> float:
    caches = [transformers.DynamicCache(), transformers.DynamicCache()]
    with torch.no_grad():
        for cache, ids in zip(caches, (into, donor), strict=True):
            plain(torch.tensor([ids[:-1]]), past_key_values=cache)
        for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            for p in positions:
                mine.keys[:, :, p], mine.values[:, :, p] = theirs.keys[:, :, p], theirs.values[:, :, p]
        mask = torch.ones(1, len(into), dtype=torch.long)
        logits = plain(torch.tensor([into[-1:]]), past_key_values=caches[0], attention_mask=mask).logits
    return float(logits[0, -1, pair.target_action] - logits[0, -1, pair.base_action])


def test_the_lender_is_the_designs_other_pair_and_nothing_else():
    pair, other = square("open"), square("shut")
    stranger = replace(other, pair=replace(other.pair, id="q", group="h"))
    longer = replace(other, base_ids=(*other.base_ids, 5), target_ids=(*other.target_ids, 5))
    reworded = replace(other, base_ids=(*other.base_ids[:9], 3, *other.base_ids[10:]))

    def lent(*others: TokenPair) -> list[TokenPair]:
        return dissociation.donors(pair, {one.pair.id: one for one in (pair, *others)}, {})

    assert lent(other) == [other]
    assert lent() == lent(stranger) == lent(longer) == lent(reworded) == []


def test_the_fields_cells_are_never_lent():
    pair = replace(square("open"), changed=(2, 12))  # as in a layout with the rules first
    lender = SimpleNamespace(pair=pair, states={"base": None, "target": None})
    made = {edit.name: edit.positions for edit in dissociation.interventions(pair, [lender])}  # pyright: ignore[reportArgumentType]
    assert 4 in made["notes"]
    assert 4 not in made["same_conclusion"]
    assert 4 not in made["other_field"]


def instance(name: str, *, trigger: float, notes: float, same: float | None = None, passed: bool = True) -> Instance:
    """Base is -1, target 3."""
    margins = {"trigger_only": trigger, "notes": notes, "both": 3.0}
    margins |= {"target_trigger_from_base": notes, "target_notes_from_base": trigger}
    margins |= {} if same is None else {"same_conclusion": same, "other_field": notes}
    return measured(name, base=-1.0, target=3.0, measures={"margins": margins}, passed=passed, kind="polarity")


def test_summary_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [
        instance("a", trigger=-1.0, notes=3.0, same=0.0),
        instance("b", trigger=1.0, notes=1.0, same=-1.0),
        instance("c", trigger=-1.0, notes=-0.5, same=3.0),
        instance("d", trigger=3.0, notes=3.0, passed=False),
    ]
    rows = [one.model_copy(update={"group": design}) for one, design in zip(rows, "xxyy", strict=True)]
    found = {(e.name, e.gated): e for e in dissociation.summarise(rows, config(tmp_path), floor=1e-6).effects}
    assert found["trigger_only", True].estimate == pytest.approx(2 / 12)
    assert found["notes", True].estimate == pytest.approx((4 + 2 + 0.5) / 12)
    assert found["trigger_share", True].estimate == pytest.approx((2 + 12 - 6.5) / 24)
    assert found["interaction", True].estimate == pytest.approx((12 - 2 - 6.5) / 12)
    assert found["flips_trigger", True].estimate == pytest.approx(1 / 3)
    assert found["flips_notes", True].estimate == pytest.approx(2 / 3)
    assert found["flips_notes_back", True].estimate == pytest.approx(2 / 3)
    assert found["flips_both_ways", True].estimate == pytest.approx(1 / 3)
    assert found["same_conclusion", True].estimate == pytest.approx(1 / 8)  # what lent to c fails the gate
    assert found["other_field", True].estimate == pytest.approx(6 / 8)
    assert found["same_conclusion", True].n == 2
    assert found["same_conclusion", True].control
    assert found["trigger_only", False].estimate == pytest.approx(6 / 16)


def test_too_few_scenarios_report_no_recovery(tmp_path):
    summary = dissociation.summarise([instance("a", trigger=-1, notes=3)], config(tmp_path), floor=1e-6)
    assert {effect.estimate for effect in summary.effects} == {None}
    assert "no recovery (1 pair(s) in 1 scenario(s) pass the gate" in summary.headline


def test_the_figure_shows_every_panel_and_says_where_there_is_nothing_to_show(tmp_path):
    from figures import dissociation as figures
    from figures import style

    settings = config(tmp_path, model="planted-mixed", task="planted", layout="words_field_first", n=12)
    record = runner.execute(dissociation, settings)
    none = make_record(included=0, gated=3).model_copy(update={"study": "dissociation"})
    with style.styled():
        drawn = figures.draw({"m/dissociation/a": record, "m/dissociation/b": none})
    left, right = drawn["m/dissociation/a"].axes
    rows = [one.get_text() for one in left.get_yticklabels()]
    assert len(rows) == len(figures.RECOVERIES)
    assert any("control" in row for row in rows)
    assert "0.70 [" in " ".join(one.get_text() for one in left.texts).replace("  ", " ")  # planted: notes carry 0.7
    assert right.lines
    assert "No recovery to report" in drawn["m/dissociation/b"].axes[0].get_title("left")
    assert list(tmp_path.rglob("*.png"))
