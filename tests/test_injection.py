"""The injection study: planted answers, an independent loop in plain transformers, its choices and its summary."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from sample_record import make_record, measured

from kvnotes import config as configs
from kvnotes import donors, effects, models, runner, select
from kvnotes.instance import TokenPair
from kvnotes.planted import PLANTED
from kvnotes.records import Instance, Tokens
from kvnotes.sweep import Trial
from probes import injection
from tests import tiny
from tests.test_prompts import arm, pair, tokenise

NEEDED = {"notes": 1, "mixed": 1, "both": 2}
COUNTS = injection.COUNTS


def config(tmp_path, **flags) -> injection.Settings:
    flags = {"results": tmp_path, "resamples": 500, "draws": 3, **flags}
    made = configs.make(injection.Settings, study="injection", flags=flags)
    assert isinstance(made, injection.Settings)
    return made


@pytest.mark.parametrize("model", ["planted-notes", "planted-direct", "planted-mixed", "planted-both-gqa"])
def test_planted_models_give_the_planted_answers(model, tmp_path):
    layout = "words_field_first"
    record = runner.execute(injection, config(tmp_path, model=model, task="planted", layout=layout, n=12))
    spec, found = PLANTED[model], {one.name: one.estimate for one in record.summary.effects if one.gated}
    assert record.inclusion.included == 12
    assert found["full_notes"] == pytest.approx(spec.alpha, abs=1e-3)
    assert found["follow_rate"] == found["follow_rate_back"] == (spec.alpha > 0.5)
    assert found["top_8"] == pytest.approx(spec.alpha, abs=1e-3)  # the held-out ranking finds the note delimiters
    needed = NEEDED.get(spec.kind)
    assert found["smallest"] == found["smallest_in_sample"] == (needed and pytest.approx(needed))
    if needed:
        assert found[f"top_{needed}"] == pytest.approx(spec.alpha, abs=1e-3)
    assert found["random_8"] == pytest.approx(0, abs=1e-3)
    # what a planted note holds is permit or restrict, which any scenario's decision can read
    assert found["foreign_conclusion"] == pytest.approx(spec.alpha, abs=1e-3)
    assert found["foreign_opposite_top_8"] == pytest.approx(spec.alpha, abs=1e-3)
    assert found["foreign_same_top_8"] == pytest.approx(0, abs=1e-3)
    for one in record.instances:
        lender = next(other for other in record.instances if other.id == one.measures["lender"])
        assert lender.scenario != one.scenario
        assert lender.balance["base_conclusion"] == one.balance["base_conclusion"]


def scene(name: str, *, more: str = "", turned: bool = False) -> TokenPair:
    """A pair of the tiny vocabulary; `turned` exchanges its arms' conclusions."""
    fields = [("open", " allow"), ("shut", " deny")]
    base, target = (arm(field, action, more=more) for field, action in (fields[::-1] if turned else fields))
    made = replace(pair(base, target), id=name, scenario=name, balance={"base_conclusion": "permit"})
    tokens = tokenise(made)
    assert isinstance(tokens, TokenPair)
    return tokens


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_a_plain_transformers_loop(kind, tmp_path):
    """The same cells put by hand into a Hugging Face cache; a lender's come from its prompt run where they must go."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = models.load(str(folder), device="cpu", dtype="float32")
    # 4 FIELD 5 . 6 if 7 open 8 then 9 allow 10 ; 11 what 12 to 13 do 14 answer 15 :
    own, other, notes = scene("a"), scene("b", more="rule calm ", turned=True), range(5, 15)
    ranking = [select.slot_names(own)[p] for p in (10, 5, 13)]  # and then the others as they stand
    plan = {
        "rankings": {"l": {"folds": {"a": 0}, "tested_with": {"0": ranking, "1": []}}},
        "lenders": {"a": "b"},
    }
    trial = Trial.run(model, own, engine="rows", budget=10**7)
    measured = injection.measure(trial, config(tmp_path), plan, donors=[donors.fill(model, other)])
    order = [10, 5, 13, *(p for p in notes if p not in (10, 5, 13))]
    target = {p: (own.target_ids, p) for p in notes}
    expected = [by_hand(plain, own, {p: target[p] for p in order[:k]}) for k in range(1, 11)]
    assert measured["ranked"] == pytest.approx(expected, abs=1e-4)
    places = {**{p: p for p in range(5, 14)}, 14: 16}
    lent = {
        arm: by_hand(plain, own, {p: (ids, q) for p, q in places.items()})
        for arm, ids in (("same", other.base_ids), ("opposite", other.target_ids))
    }
    margins = measured["margins"]
    assert margins["full_notes"] == pytest.approx(expected[-1], abs=1e-4)
    assert margins["foreign_same"] == pytest.approx(lent["same"], abs=1e-4)
    assert margins["foreign_opposite"] == pytest.approx(lent["opposite"], abs=1e-4)
    assert abs(lent["same"] - lent["opposite"]) > 1e-2
    assert measured["slots shared with the lender"] == 10
    surveyed = injection.survey(trial, config(tmp_path))
    singles = [by_hand(plain, own, {p: target[p]}) for p in notes]
    assert surveyed["singles"] == pytest.approx(singles, abs=1e-4)
    first = notes[max(range(10), key=singles.__getitem__)]
    assert surveyed["own"][0] == pytest.approx(by_hand(plain, own, {first: target[first]}), abs=1e-4)
    assert surveyed["own"][-1] == pytest.approx(expected[-1], abs=1e-4)


def by_hand(plain, own: TokenPair, cells) -> float:
    """Margin with the cells at some positions from (a prompt's tokens, its position)."""
    mine = cache(plain, own.base_ids, shift=0)
    for p, (ids, at) in cells.items():
        theirs = cache(plain, ids, shift=p - at)
        for ours, layer in zip(mine.layers, theirs.layers, strict=True):
            ours.keys[:, :, p], ours.values[:, :, p] = layer.keys[:, :, at], layer.values[:, :, at]
    with torch.no_grad():
        mask = torch.ones(1, len(own.base_ids), dtype=torch.long)
        logits = plain(torch.tensor([own.base_ids[-1:]]), past_key_values=mine, attention_mask=mask).logits
    return float(logits[0, -1, own.target_action] - logits[0, -1, own.base_action])


def cache(plain, ids, *, shift: int) -> transformers.DynamicCache:
    made = transformers.DynamicCache()
    with torch.no_grad():
        at = torch.arange(len(ids) - 1)[None] + shift
        plain(torch.tensor([ids[:-1]]), past_key_values=made, position_ids=at)
    return made


def test_random_notes_are_never_among_the_best(tmp_path, monkeypatch):
    own = scene("a")
    asked = {}

    def margins(edits):
        asked.update({edit.name: set(edit.positions) for edit in edits})
        return {edit.name: 0.0 for edit in edits}

    trial = SimpleNamespace(pair=own, margins=margins)
    ranking = [select.slot_names(own)[p] for p in own.downstream]
    plan = {"rankings": {"l": {"folds": {"a": 0}, "tested_with": {"0": ranking, "1": []}}}, "lenders": {"a": None}}
    found = injection.measure(trial, config(tmp_path, draws=4), plan, donors=[])  # pyright: ignore[reportArgumentType]
    for k in COUNTS:
        best = asked.get(f"ranked_{k}", set(own.downstream))
        sets = [positions for name, positions in asked.items() if name.startswith(f"random_{k}_")]
        assert all(len(one) == k and not one & best for one in sets)
        assert len(found["random"][str(k)]) == len(sets) == (4 if k <= 4 else 0)  # of ten notes, no eight others
    assert found["random sets possible"] == {"1": 9, "2": 28, "4": 15, "8": 0, "16": 0, "32": 0}
    assert found["lender"] is None
    assert injection.donors(own, {}, plan) == []


FOREIGN = ("foreign_opposite", "foreign_same", "foreign_opposite_top_8", "foreign_same_top_8")


def instance(
    name: str,
    *,
    singles=(0.0, 0.0),
    ranked=(-1.0, 3.0),
    own=(1.0, 3.0),
    random=(-1.0,),
    foreign: tuple[float, float] | None = None,
    words=(1, 2),
    rows: str = "x",
    passed: bool = True,
) -> Instance:
    """Base is -1, target 3; four tokens: text, the field, two delimiters that are the notes, the query."""
    margins = {"full_notes": ranked[-1], "full_notes_back": own[0] - 2}
    lent = {}
    if foreign is not None:
        lent = {name: [0.0, margin, 1.5, 0.0] for name, margin in zip(FOREIGN, foreign * 2, strict=True)}
        margins |= dict(zip(FOREIGN, foreign * 2, strict=True))
    measures = {
        "base permits": True,
        "singles": list(singles),
        "ranked": list(ranked),
        "own": list(own),
        "random": {str(k): list(random) if k == 1 else [] for k in COUNTS},
        "margins": margins,
        "logits of both pairs' actions": lent,
    }
    return measured(
        name,
        base=-1.0,
        target=3.0,
        measures=measures,
        passed=passed,
        scenario=name.split("/", maxsplit=1)[0],
        balance={"rows": rows},
        tokens=Tokens(
            base=(0,) * 5, target=(0,) * 5, changed=(1,), query=(4,), base_action=words[0], target_action=words[1]
        ),
        spans={"text": ((0, 1),), "field": ((1, 2),), "delimiter": ((2, 4),), "answer_prefix": ((4, 5),)},
    )


def test_no_scenario_has_a_part_in_the_ranking_it_is_tested_with(tmp_path):
    rows = [instance(f"s{i}", singles=(0.0, 1.0)) for i in range(8)]
    plan = injection.prepare(rows, config(tmp_path))["rankings"]
    assert {select.choice(plan, layout="l", scenario=f"s{i}")[0] for i in range(8)} == {"delimiter[1]"}
    for one in range(8):  # a wild scenario turns the ranking of the other fold, and never its own
        wild = [replace_singles(row, (99.0, 0.0)) if row.id == f"s{one}" else row for row in rows]
        turned = injection.prepare(wild, config(tmp_path))["rankings"]
        led = {f"s{i}": select.choice(turned, layout="l", scenario=f"s{i}")[0] for i in range(8)}
        assert led[f"s{one}"] == "delimiter[1]"
        assert sum(slot == "delimiter[0]" for slot in led.values()) == 4


def replace_singles(one: Instance, singles) -> Instance:
    return one.model_copy(update={"measures": {**one.measures, "singles": list(singles)}})


def test_the_lender_is_competent_of_another_scenario_and_of_other_words(tmp_path):
    one = instance("a/1", words=(1, 2), rows="x")
    others = [
        instance("a/2", words=(5, 6)),  # the same scenario
        instance("b", words=(1, 6)),  # a word in common
        instance("c", words=(5, 6), passed=False),  # incompetent
        instance("d", words=(5, 6), rows="y"),  # another order of the rules
    ]
    found = injection.prepare([one, *others], config(tmp_path))["lenders"]
    assert found["a/1"] == "d"
    nearer = injection.prepare([one, *others, instance("e", words=(7, 8), rows="x")], config(tmp_path))["lenders"]
    assert nearer["a/1"] == "e"
    assert injection.prepare([one, *others[:3]], config(tmp_path))["lenders"]["a/1"] is None


def test_summary_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [
        instance("a", ranked=(-1.0, 3.0), own=(1.0, 3.0), random=(-1.0, 1.0), foreign=(3.0, -1.0)),
        instance("b", ranked=(1.0, 2.0), own=(1.0, 2.0), random=(-1.0, -1.0), foreign=(1.0, 0.0)),
        instance("c", ranked=(-0.5, -0.5), own=(-0.5, -0.5), random=()),
        instance("d", passed=False),
    ]
    summary = injection.summarise(rows, config(tmp_path), floor=1e-6)
    found = {(one.name, one.gated): one for one in summary.effects}
    assert found["full_notes", True].estimate == pytest.approx((4 + 3 + 0.5) / 12)
    assert found["follow_rate", True].estimate == pytest.approx(2 / 3)
    assert found["follow_rate_back", True].estimate == 1.0
    assert found["top_1", True].estimate == pytest.approx((0 + 2 + 0.5) / 12)
    assert found["in_sample_1", True].estimate == pytest.approx((2 + 2 + 0.5) / 12)
    assert found["top_2", True].estimate == found["full_notes", True].estimate
    assert found["top_8", True].estimate is None  # there are only two
    assert found["flips_top_1", True].estimate == pytest.approx(1 / 3)
    assert found["random_1", True].estimate == pytest.approx((1 + 0) / 8)  # c has no random set
    assert found["flips_random_1", True].estimate == pytest.approx(0.25)
    assert found["random_1", True].control
    assert found["random_8", True].estimate is None
    assert found["smallest", True].estimate == pytest.approx((2 + 1) / 2)  # c never flips
    assert found["smallest_in_sample", True].estimate == pytest.approx(1)
    assert found["foreign_opposite", True].estimate == pytest.approx((4 + 2) / 8)
    assert found["foreign_same", True].estimate == pytest.approx((0 + 1) / 8)
    assert found["foreign_conclusion", True].estimate == pytest.approx(5 / 8)
    assert found["says_lender", True].estimate == pytest.approx(0.5)  # 1.5 is above b's 1.0, below a's 3.0
    assert found["says_lender_same", True].estimate == 0.0
    assert found["says_lender_same", True].control
    table = summary.tables[f"{injection.SMALLEST}, l"]
    assert table.rows[0][1:4] == [3, 2, "2"]  # of 1, 2 and never
    assert "all notes 0.62" in summary.headline
    assert "median 2 needed" in summary.headline


def test_smallest_is_the_first_count_that_flips():
    assert injection.smallest([-1.0, 0.0, 0.5, -1.0]) == 3
    assert injection.smallest([-1.0, 0.0]) is None


def test_the_figure_shows_every_panel_and_says_where_there_is_nothing_to_show(tmp_path):
    from figures import injection as figures
    from figures import style

    settings = config(tmp_path, model="planted-mixed", task="planted", layout="words_field_first", n=12)
    record = runner.execute(injection, settings)
    none = make_record(included=0, gated=3).model_copy(update={"study": "injection"})
    with style.styled():
        drawn = figures.draw({"m/injection/a": record, "m/injection/b": none})
    left, right, below = drawn["m/injection/a"].axes
    rows = [one.get_text() for one in left.get_yticklabels()]
    assert len(rows) == len(figures.RECOVERIES)
    assert any("control" in row for row in rows)
    assert "0.70 [" in " ".join(one.get_text() for one in left.texts).replace("  ", " ")  # planted: notes carry 0.7
    assert right.lines
    assert len(below.get_yticklabels()) == len(figures.LENT)
    assert "No recovery to report" in drawn["m/injection/b"].axes[0].get_title("left")
    assert list(tmp_path.rglob("*.png"))
