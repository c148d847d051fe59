"""Effects by hand: noise that drowns them, ratios that mean nothing, shares without spread."""

import pytest

from kvnotes.effects import Scope, competence, moved
from tests.test_locality import config, instance

ROWS = [instance(f"s{i}", base=-1.0, target=1.0, field=-1.0 + 0.01 * i, notes=1.0) for i in range(6)]


def scope(tmp_path, floor: float, rows=ROWS) -> Scope:
    return Scope(instances=rows, layout="l", gated=True, config=config(tmp_path), floor=floor)


def field(one):
    return moved(one, one.measures["margins"]["field_only"])


def test_an_effect_below_the_noise_is_unresolved(tmp_path):
    # the field moves 0, .01 .. .05 logits, .025 in the mean, of a gap of 2
    assert not scope(tmp_path, 0.02).recovery("f", "f", field).unresolved
    assert scope(tmp_path, 0.03).recovery("f", "f", field).unresolved


def test_noise_as_large_as_the_margin_cannot_show_equivalence(tmp_path):
    quiet = scope(tmp_path, 0.1).recovery("f", "f", field, about=0.0).test
    loud = scope(tmp_path, 0.2).recovery("f", "f", field, about=0.0).test  # .2 logits of a gap of 2 is .1
    assert quiet is not None
    assert quiet.conclusion == "equivalent"
    assert loud is not None
    assert loud.conclusion == "inconclusive: the noise floor is 0.1 of recovery"


def test_one_gap_within_the_noise_has_no_mean_of_ratios(tmp_path):
    rows = [*ROWS, instance("z", base=0.5, target=0.5 + 1e-7, field=0.7, notes=0.5)]
    effect = scope(tmp_path, 1e-5, rows).recovery("f", "f", field)
    assert effect.mean_of_ratios is None
    assert effect.estimate == pytest.approx((0.15 + 0.2) / 12)


def test_a_share_without_spread_counts_scenarios_not_pairs(tmp_path):
    rows = [instance(f"{i}", base=-1.0, target=1.0, field=-1.0, notes=1.0) for i in range(40)]
    rows = [one.model_copy(update={"scenario": f"s{i % 8}"}) for i, one in enumerate(rows)]
    effect = scope(tmp_path, 0.0, rows).share("x", "x", lambda one: False)
    assert (effect.estimate, effect.n, effect.clusters) == (0.0, 40, 8)
    assert effect.high == pytest.approx(1 - 0.025 ** (1 / 8))  # Clopper-Pearson for 0 of 8


def test_competence_counts_arms_and_designs():
    right = instance("a", base=-1.0, target=1.0, field=0.0, notes=0.0)
    wrong = instance("b", base=1.0, target=2.0, field=0.0, notes=0.0, passed=False)
    square = [one.model_copy(update={"group": "g"}) for one in (right, wrong)]
    assert competence(square).rows == [["l", 2, 1, 1, 2, "4 of 4", "0 of 1 right in all four cells"]]
    assert competence([right]).rows[0][-1] == "none"


def test_a_family_is_corrected_together_and_skips_what_an_instance_lacks(tmp_path):
    """Eight scenarios that all move up give sign flips p = 2/256; two such of three members: 2/256 * 3/2 by BH."""
    rows = [instance(f"s{i}", base=-1.0, target=1.0, field=0.1 * (i + 1), notes=1.0) for i in range(8)]
    members = {
        "up": lambda one: moved(one, one.measures["margins"]["field_only"]),
        "full": lambda one: moved(one, one.measures["margins"]["notes_only"]),
        "mixed": lambda one: 0.5 if int(one.id[1:]) % 2 else -0.5,
        "rare": lambda one: 1.0 if one.id in ("s0", "s1") else None,
        "seven": lambda one: None if one.id == "s0" else 1.0,
    }
    found = {one.name: one for one in scope(tmp_path, 1e-6, rows).family(members)}
    p = {name: one.test.p for name, one in found.items() if one.test is not None}
    assert found["up"].estimate == pytest.approx(sum(1 + 0.1 * (i + 1) for i in range(8)) / 16)
    assert found["seven"].n == 7
    assert found["seven"].estimate == 0.5
    assert found["rare"].estimate is None
    # the rare one is not tested; the four others, in order: 2/256, 2/256, 2/128, 1
    assert p == pytest.approx({"up": 2 / 256 * 4 / 2, "full": 2 / 256 * 4 / 2, "seven": 2 / 128 * 4 / 3, "mixed": 1.0})
    assert "BH over 4" in found["up"].model_dump_json()
    assert scope(tmp_path, 1e-6, []).family(members)[0].estimate is None


def test_a_mean_is_over_the_instances_that_have_the_number(tmp_path):
    made = scope(tmp_path, 0.0).mean("m", "m", lambda one: float(one.id[1:]))
    assert (made.estimate, made.n, made.clusters, made.test) == (2.5, 6, 6, None)
    assert scope(tmp_path, 0.0).mean("m", "m", lambda one: None if one.id == "s0" else 1.0).estimate is None
