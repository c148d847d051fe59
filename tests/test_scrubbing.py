"""Causal scrubbing: planted answers, an independent splice in plain transformers, who lends what, a summary by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sample_record import make_record, measured

from circuits import scrubbing
from kvnotes import config as configs
from kvnotes import discover, donors, effects, hypothesis, models, relatives, runner, select, sites
from kvnotes.hypothesis import Hypothesis, Resampling
from kvnotes.instance import Arm, Pair, Piece, TokenPair
from kvnotes.planted import PLANTED
from kvnotes.records import Instance, Record, Tokens
from kvnotes.sweep import Trial
from tests import tiny
from tests.test_prompts import tokenise

DRAWN = "planted-mixed-gqa"
OTHER = {"open": "shut", "shut": "open"}


def config(tmp_path, **flags) -> scrubbing.Settings:
    flags = {"results": tmp_path, "resamples": 500, "fillers": 1, "draws": 8, "wrong": 4, **flags}
    made = configs.make(scrubbing.Settings, study="scrubbing", flags=flags)
    assert isinstance(made, scrubbing.Settings)
    return made


# --- planted models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The record of a planted model, run once, and where it is."""

    @cache
    def record(model: str) -> tuple[Record, Path]:
        folder = tmp_path_factory.mktemp(model)
        layout = "words_rules_first" if model == "planted-and" else "words_field_first"
        settings = config(folder, model=model, task="planted", layout=layout, n=12)
        with pytest.MonkeyPatch.context() as patch:
            if model != DRAWN:
                patch.setattr(runner, "_draw", lambda *_: [])
            return runner.execute(scrubbing, settings), folder

    return record


@pytest.mark.parametrize("model", ["planted-notes", "planted-direct", "planted-mixed-gqa", "planted-and"])
def test_planted_models_give_the_planted_answers(model, planted):
    record, folder = planted(model)
    found = {one.name: one.estimate for one in record.summary.effects if one.gated}
    alpha = PLANTED[model].alpha
    expected = {
        **dict.fromkeys(("drift", "drift_target", "drift_size", "rest_swap", "rest_swap_any_slot", "scrubbed"), 0.0),
        **dict.fromkeys(("note_drift", "rest_drift", "note_swap_wrong", "note_swap_wrong_any_slot"), 0.0),
        **dict.fromkeys(("swap", "note_swap", "note_swap_any_slot", "note_swap_in_sample", "crossed"), alpha),
        **dict.fromkeys(("note_minus_rest", "note_minus_rest_any_slot", "rest_swap_wrong"), alpha),
        "drift_field": alpha * 2 / 3,  # of the same field: the target, and both arms with other neutral rules, 2 of 3
        "cosine": 1.0,
        "argmax_kept": 1.0,
        "flips_note_swap": float(alpha > 0.5),
        "flips_rest_swap": 0.0,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-3), name
    assert all(check.passed for check in record.checks)
    assert len(record.checks) == 7
    assert {len(one.measures["donors"]) for one in record.instances} == {8}
    by_instance = record.summary.tables["by instance"]
    assert all(row[5] == pytest.approx(alpha, abs=1e-3) for row in by_instance.rows)
    drawn = {row[0]: row for row in record.summary.tables["against drawn notes"].rows}["any slots"]
    if model == "planted-and":  # its notes do nothing one by one
        return
    moved = by_single_effects(record, config(folder), "permuted, any slot")
    assert drawn[3:6] == [pytest.approx(sum(moved) / 8, abs=1e-3), pytest.approx(max(moved), abs=1e-3), 8]
    assert found["note_swap_random_any_slot"] == pytest.approx(sum(moved) / 8, abs=1e-3)
    if alpha:
        assert drawn[6] == (1 + sum(value > alpha - 1e-3 for value in moved)) / 9  # the note and 8 permutations


def by_single_effects(record: Record, settings: scrubbing.Settings, name: str) -> list[float]:
    """What each of a hypothesis' notes recovers where the single effects of its slots add up."""
    plan, rows = scrubbing.prepare(record.instances, settings)["notes"], gated_of(record)

    def moved(one: Instance) -> list[float]:
        chosen = select.choice(plan, layout=one.layout, scenario=one.scenario)[name]["sets"]
        return [sum(sites.moved(one)[slot] for slot in note) for note in chosen]

    gaps = sum(effects.gap(one) for one in rows)
    return [sum(values) / gaps for values in zip(*map(moved, rows), strict=True)]


def gated_of(record: Record) -> list[Instance]:
    return [one for one in record.instances if one.status == "included"]


def test_another_hypothesis_is_another_value(tmp_path, monkeypatch):
    """The note is the first note delimiter and carries which rules there are: false on a model that notes a conclusion,
    since the other field's notes of the same rules say the opposite."""
    drift = Resampling(name="drift", words="whole, same {}", note="agrees", rest="agrees")
    claimed = Hypothesis(name="rules", words="any", suffix="rules", variable="rules", tests=(drift, *scrubbing.SWAPS))
    monkeypatch.setattr(runner, "_draw", lambda *_: [])
    monkeypatch.setattr(scrubbing, "HYPOTHESES", (*scrubbing.HYPOTHESES, claimed))
    settings = config(tmp_path, model="planted-notes", task="planted", layout="words_field_first", n=12, fillers=0)
    record = runner.execute(scrubbing, settings)
    found = {one.name: one for one in record.summary.effects if one.gated}
    assert found["drift_rules"].estimate == pytest.approx(1.0, abs=1e-3)  # the one other prompt with these rules
    assert found["note_swap_rules"].estimate == pytest.approx(0.5, abs=1e-3)  # of the two others, one agrees
    assert found["drift_rules"].test is not None
    assert found["drift_rules"].test.conclusion == "different"


def test_a_field_pair_is_scrubbed_with_other_neutral_rules(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_draw", lambda *_: [])
    settings = config(tmp_path, model="planted-notes", task="planted", pair="field", layout="words_field_first", n=12)
    record = runner.execute(scrubbing, settings)
    found = {one.name: one.estimate for one in record.summary.effects if one.gated}
    for name, value in {"drift": 0.0, "note_swap": 1.0, "rest_swap": 0.0, "note_swap_any_slot": 1.0}.items():
        assert found[name] == pytest.approx(value, abs=1e-3), name
    assert {len(one.measures["donors"]) for one in record.instances} == {4}  # the other rules are no pair of a 2x2


# --- against plain transformers -----------------------------------------------------------------------------


def arm(field: str, first: str, fillers: str) -> Arm:
    """`first` is the value of the rule that allows; the other value's rule denies."""
    return Arm(
        user=(
            Piece(text="the state is ", role="text"),
            Piece(text=field, role="field"),
            Piece(text=" . ", role="delimiter"),
            Piece(text="if ", role="text"),
            Piece(text=first, role="trigger", key="first"),
            Piece(text=" then allow ", role="text"),
            Piece(text="; ", role="delimiter"),
            Piece(text="if ", role="text"),
            Piece(text=OTHER[first], role="trigger", key="second"),
            Piece(text=" then deny ", role="text"),
            Piece(text="; ", role="delimiter"),
            Piece(text=fillers, role="filler"),
            Piece(text=" what to do ", role="request"),
        ),
        answer=(Piece(text="answer :", role="answer_prefix"),),
        action=" allow" if field == first else " deny",
        field=field,
    )


def pair_of(field: str, fillers: str = "rule calm") -> Pair:
    """One pair of the 2x2 design: the rule inverts, the field stays."""
    return Pair(
        id=f"p-{field}",
        kind="polarity",
        task="t",
        layout="l",
        scenario="s",
        domain="d",
        group="g",
        seed=0,
        base=arm(field, "open", fillers),
        target=arm(field, "shut", fillers),
    )


def square(field: str, fillers: str = "rule calm", name: str = "p") -> TokenPair:
    made = tokenise(replace(pair_of(field, fillers), id=f"{name}-{field}"))
    assert isinstance(made, TokenPair)
    return made


MORE = "rule filler calm"  # a word more than in the pair itself: all after it stands a position later
# 4 FIELD 5 . 6 if 7 A 8 then 9 allow 10 ; 11 if 12 B 13 then 14 deny 15 ; 16 rule 17 calm 18 what 19 to 20 do 21 answer
PLACES = (8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19, 20, 21)
MOVED = {p: p + (p > 17) for p in PLACES}
NOTES = {"aggregators": [["delimiter[1]", "delimiter[2]"]], "any slot": [["text[10]", "delimiter[2]", "request[2]"]]}
NOTES |= {"field": NOTES["any slot"], "coin": NOTES["any slot"], "wrong": [["text[4]"], ["request[0]", "filler[1]"]]}
WHERE = {"delimiter[1]": 10, "delimiter[2]": 15, "request[0]": 18, "request[2]": 20, "filler[1]": 17}


def plan_of(pair: TokenPair) -> dict[str, Any]:
    names = select.slot_names(pair)
    known = {name: [[slot for slot in note if slot in names] for note in sets] for name, sets in NOTES.items()}
    chosen = {one.name: {"sets": known.get(one.name, [])} for one in scrubbing.HYPOTHESES}
    own = {one.name: {"sets": [["request[2]"]]} for one in (scrubbing.IN_SAMPLE, scrubbing.ANY_SLOT_IN_SAMPLE)}
    return {
        "notes": {"l": {"folds": {"s": 0}, "tested_with": {"0": chosen, "1": {}}}},
        "in-sample": {pair.pair.id: own},
    }


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_a_splice_in_plain_transformers(kind, tmp_path, monkeypatch):
    """Every margin of every test, from cells put by hand into a Hugging Face cache; a lender whose neutral rules are
    longer is run where its cells must stand."""
    moved = {field: square(field, MORE, name=f"{field}~1") for field in ("open", "shut")}
    monkeypatch.setattr(relatives, "refills", lambda _, pair, *__, **___: [moved[pair.pair.base.field]])
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = models.load(str(folder), device="cpu", dtype="float32")
    own, other = square("open"), square("shut")
    assert hypothesis.free(own) == PLACES
    names = select.slot_names(own)
    assert {slot: names[p] for slot, p in WHERE.items()} == {slot: slot for slot in WHERE}
    trial = Trial.run(model, own, engine="rows", budget=10**7)
    found = scrubbing.measure(trial, config(tmp_path), plan_of(own), donors=[donors.fill(model, other)])
    lent = [(one.ids(run), {p: p for p in PLACES}) for one in (own, other) for run in hypothesis.RUNS]
    lent += [(one.ids(run), MOVED) for one in moved.values() for run in hypothesis.RUNS]

    @cache
    def splice(into: str, cells: tuple) -> float:
        return by_hand(plain, own, own.ids(into), dict(cells))  # pyright: ignore[reportArgumentType]

    compared = 0
    for one in scrubbing.HYPOTHESES:
        sets = [
            {names.index(slot) for slot in note}
            for note in plan_of(own)["notes"]["l"]["tested_with"]["0"][one.name]["sets"]
        ]
        sets = [{20}] if one.chosen == "in_sample" else sets
        for test in one.tests:
            got = found["tests"][one.name].get(test.name)
            if got is None:
                assert not sets or one.variable == "coin"
                continue
            for note, row in zip(sets, got["margins"], strict=True):
                for who, margin in zip(got["by"], row, strict=True):
                    cells = []
                    for at, positions in zip(who, (note, set(PLACES) - note), strict=True):
                        if at is not None:
                            ids, places = lent[at]
                            cells += [(p, (ids, places[p])) for p in sorted(positions)]
                    assert margin == pytest.approx(splice(test.into, tuple(sorted(cells))), abs=1e-4)
                    compared += 1
    assert compared > 100
    assert max(scrubbing.identities(trial, found).values()) < 1e-5
    assert [one["refilled"] for one in found["donors"]] == [False] * 4 + [True] * 4
    # open under "open allows" and shut under "shut allows" conclude the same, whatever the neutral rules
    assert [one["conclusion"] for one in found["donors"]] == [" allow", " deny", " deny", " allow"] * 2
    assert found["tests"]["aggregators"]["drift"]["by"] == [(3, 3), (4, 4), (7, 7)]
    assert found["tests"]["aggregators"]["drift_target"]["by"] == [(2, 2), (5, 5), (6, 6)]
    assert found["tests"]["aggregators"]["note_swap"]["by"] == [(i, None) for i in (1, 2, 5, 6)]
    assert found["tests"]["aggregators"]["scrubbed"]["by"] == [(3, 1), (4, 2), (7, 5), (3, 6)]
    assert found["tests"]["wrong"]["rest_swap"]["by"] == [(None, 1), (None, 2)]  # of the 2x2 alone
    logits = [row_of(plain, own, own.base_ids, {})]
    logits += [row_of(plain, own, own.base_ids, {p: (lent[i][0], lent[i][1][p]) for p in PLACES}) for i in (3, 4, 7)]
    for key, about in (("cosine", 0.0), ("centred", 1.0)):
        rows = [row - about * row.mean() for row in logits]
        expected = [float(torch.nn.functional.cosine_similarity(row, rows[0], dim=0)) for row in rows[1:]]
        assert found["logits"]["drift"][key] == pytest.approx(expected, abs=1e-5)


def by_hand(plain, own: TokenPair, ids, cells) -> float:
    """Margin with the cells at some positions from (a prompt's tokens, its position)."""
    logits = row_of(plain, own, ids, cells)
    return float(logits[own.target_action] - logits[own.base_action])


def row_of(plain, own: TokenPair, ids, cells) -> torch.Tensor:
    mine = kept(plain, ids, 0)
    for p, (others, at) in cells.items():
        for ours, layer in zip(mine.layers, kept(plain, others, p - at).layers, strict=True):
            ours.keys[:, :, p], ours.values[:, :, p] = layer.keys[:, :, at], layer.values[:, :, at]
    with torch.no_grad():
        mask = torch.ones(1, len(ids), dtype=torch.long)
        return plain(torch.tensor([ids[-1:]]), past_key_values=mine, attention_mask=mask).logits[0, -1]


def kept(plain, ids, shift: int) -> transformers.DynamicCache:
    made = transformers.DynamicCache()
    with torch.no_grad():
        at = torch.arange(len(ids) - 1)[None] + shift
        plain(torch.tensor([ids[:-1]]), past_key_values=made, position_ids=at)
    return made


def test_prompts_with_other_neutral_rules_have_names_of_their_own(tmp_path, monkeypatch):
    model = SimpleNamespace(tokenizer=tiny.tokenizer(), template=tokenise.__defaults__[0])  # pyright: ignore
    asked = []

    def generate(**flags) -> list[Pair]:
        asked.append(flags["seed"])
        return [pair_of("open", MORE if flags["seed"] == 1 else "zebra")]  # the second has a word that is unknown

    monkeypatch.setattr(discover, "task", lambda _: SimpleNamespace(generate=generate))
    made = relatives.refills(model, square("shut"), config(tmp_path), count=2)
    assert asked == [1, 2]
    assert [one.pair.id for one in made] == ["p-shut~1"]
    assert (made[0].base_ids[16:19], made[0].pair.base.field) == (square("open", MORE).base_ids[16:19], "shut")
    bare = replace(square("open"), pair=without_fillers(pair_of("open")))
    assert relatives.refills(model, bare, config(tmp_path), count=2) == []


def without_fillers(pair: Pair) -> Pair:
    arms = {name: getattr(pair, name) for name in hypothesis.RUNS}
    kept = {name: tuple(piece for piece in one.user if piece.role != "filler") for name, one in arms.items()}
    return replace(pair, **{name: replace(one, user=kept[name]) for name, one in arms.items()})


# --- the hypothesis as data -------------------------------------------------------------------------------


def test_who_lends_to_note_and_rest():
    others = {1: "b", 2: "b", 3: "a", 5: "b", 6: "a"}
    assert hypothesis.lenders(scrubbing.DRIFT, "a", others) == [(3, 3), (6, 6)]
    assert hypothesis.lenders(scrubbing.NOTE_SWAP, "a", others) == [(1, None), (2, None), (5, None)]
    assert hypothesis.lenders(scrubbing.SCRUBBED, "a", others) == [(3, 1), (6, 2), (3, 5)]
    assert hypothesis.lenders(scrubbing.CROSSED, "a", {1: "b"}) == []  # nobody agrees
    assert [test.predicted for test in scrubbing.PARTS] == [1, 0, 0, 0, 0, 1]


def test_variables_of_a_prompt():
    made = {name: hypothesis.labels(pair_of("open"), name) for name in hypothesis.RUNS}
    assert [made[name]["conclusion"] for name in made] == [" allow", " deny"]
    assert [made[name]["rules"] for name in made] == ["open|shut", "shut|open"]
    assert {made[name]["field"] for name in made} == {"open"}
    assert hypothesis.labels(pair_of("open"), "base") == made["base"]  # a coin falls the same way again


def test_a_2x2_stands_at_the_same_positions():
    pair, other = square("open"), square("shut")
    stranger = replace(other, pair=replace(other.pair, id="q", group="h"))
    longer = square("shut", MORE)
    reworded = replace(other, base_ids=(*other.base_ids[:9], 3, *other.base_ids[10:]))

    def lent(*others: TokenPair) -> list[TokenPair]:
        return scrubbing.donors(pair, {str(i): one for i, one in enumerate((pair, *others))}, {})

    assert lent(other) == [other]
    assert lent() == lent(stranger) == lent(longer) == lent(reworded) == []


def test_the_field_is_the_input_and_never_resampled():
    pair = replace(square("open"), changed=(2, 12))  # as in a layout with the rules first
    assert 4 in pair.downstream
    assert 4 not in hypothesis.free(pair)


SPANS = {
    "text": ((0, 1),),
    "trigger": ((1, 2),),
    "action.base": ((2, 3),),
    "delimiter": ((3, 6),),
    "field": ((6, 7),),
    "request": ((7, 9),),
    "answer_prefix": ((9, 10),),
}
SLOTS = ["action.base[0]", "delimiter[0]", "delimiter[1]", "delimiter[2]", "request[0]", "request[1]"]


def surveyed(name: str, *, alone=(), lost=(), **more) -> Instance:
    """Base -1, target 3; downstream: the action, three delimiters, the field, two of the request."""
    single, without = ([*(float(x) for x in values), *[0.0] * 7][:7] for values in (alone, lost))
    measures = {"single": [x - 1 for x in single], "without": [3 - x for x in without], "notes": 3.0}
    tokens = Tokens(base=(0,) * 10, target=(0,) * 10, changed=(1,), query=(9,), base_action=1, target_action=2)
    return measured(name, base=-1.0, target=3.0, measures=measures, tokens=tokens, spans=SPANS, **more)


def test_the_note_is_what_works_alone_or_is_missed():
    one = surveyed("a", alone=(0, 3, 0, 0, 9), lost=(0, 0, 4, 2, 9))
    assert sites.either(one)["delimiter[1]"] == 2.0
    assert hypothesis.shared([one, surveyed("b")]) == SLOTS
    asked = {"size": 2, "draws": 50, "seed": 0}
    best = hypothesis.notes(scrubbing.NOTE, [one], SLOTS, **asked)
    assert best["sets"] == [["delimiter[1]", "delimiter[0]"]]
    one = surveyed("a", alone=(8, 3, 0, 0, 9), lost=(0, 0, 4, 2, 9))
    assert hypothesis.notes(scrubbing.ANY_SLOT, [one], SLOTS, **asked)["sets"] == [["action.base[0]", "delimiter[1]"]]
    assert hypothesis.notes(scrubbing.ANY_SLOT, [], SLOTS, **asked)["sets"] == []


def test_random_slots_are_the_notes_permuted_alike_in_both_folds():
    """Either fold's best are the first two slots, in the one order or the other; among others the note itself comes."""
    asked = {"size": 2, "draws": 50, "seed": 0}
    folds = [surveyed("a", alone=(8, 3)), surveyed("b", alone=(3, 8))]
    first, second = (hypothesis.notes(scrubbing.RANDOM_ANY_SLOT, [one], SLOTS, **asked) for one in folds)
    assert (first["possible"], len(first["sets"])) == (15, 50)
    assert first["sets"] == [note[::-1] for note in second["sets"]]
    assert {slot for note in first["sets"] for slot in note} == {*SLOTS}
    assert all(len({*note}) == 2 for note in first["sets"])
    assert any({*note} == {*SLOTS[:2]} for note in first["sets"])


def test_other_notes_of_the_same_classes_are_never_of_the_chosen_one():
    rows, asked = [surveyed("a", alone=(8, 3, 0, 0, 9))], {"draws": 50, "seed": 0}
    wrong = hypothesis.notes(scrubbing.WRONG, rows, SLOTS, size=1, **asked)
    assert (wrong["sets"], wrong["exact"]) == ([["delimiter[1]"], ["delimiter[2]"]], True)
    few = hypothesis.notes(scrubbing.WRONG, rows, SLOTS, size=2, **asked)
    assert not few["exact"]  # one delimiter is left, another class fills up
    assert {sum(slot.startswith("delimiter") for slot in note) for note in few["sets"]} == {1}


def test_no_scenario_has_a_part_in_its_own_note(tmp_path):
    settings = config(tmp_path, slots=1)
    rows = [surveyed(f"s{i}", alone=(0, 2)) for i in range(8)]
    plain = scrubbing.prepare(rows, settings)["notes"]

    def led(plan) -> dict[str, str]:
        return {
            f"s{i}": select.choice(plan, layout="l", scenario=f"s{i}")["aggregators"]["sets"][0][0] for i in range(8)
        }

    assert set(led(plain).values()) == {"delimiter[0]"}
    for at in range(8):  # a wild scenario turns the note of the other fold, and never its own
        wild = [surveyed(f"s{at}", alone=(0, 0, 99)) if i == at else row for i, row in enumerate(rows)]
        turned = scrubbing.prepare(wild, settings)
        assert led(turned["notes"])[f"s{at}"] == "delimiter[0]"
        assert sum(slot == "delimiter[1]" for slot in led(turned["notes"]).values()) == 4
        assert turned["in-sample"][f"s{at}"]["in-sample"]["sets"] == [["delimiter[1]"]]


def test_the_folds_of_a_draw():
    # chosen 3 + 2; draws 1 + 0 and 2 + 1, none as large; chosen 1 + 1, the only draw 3 + 0
    assert effects.fold_p({0: 3.0, 1: 2.0}, {0: [1.0, 2.0], 1: [0.0, 1.0]}) == pytest.approx(1 / 3)
    assert effects.fold_p({0: 1.0, 1: 1.0}, {0: [3.0], 1: [0.0]}) == 1.0
    assert effects.fold_p({0: 1.0}, {0: []}) is None
    assert effects.fold_p({}, {}) is None


# --- the summary ------------------------------------------------------------------------------------------


def lender(
    conclusion: str, *, field: str = "f", rules: str = "r", competent: bool = True, refilled: bool = False
) -> dict[str, Any]:
    return {"conclusion": conclusion, "field": field, "rules": rules, "competent": competent, "refilled": refilled}


def instance(name: str, *, fold: int, drift, note, rest, random, passed: bool = True) -> Instance:
    """Base is -1, target 3. Lenders: the own arms, the other pair's (whose base fails the gate), one of other neutral
    rules that concludes as the base."""
    found = {"drift": {"by": [[3, 3], [4, 4]], "margins": [list(drift)]}}
    swaps = {"note_swap": note, "rest_swap": rest}
    by = {"note_swap": [[1, None], [2, None]], "rest_swap": [[None, 1], [None, 2]]}
    found |= {key: {"by": by[key], "margins": [list(margins)]} for key, margins in swaps.items()}
    drawn = {"note_swap": {"by": [[1, None]], "margins": [[margin] for margin in random]}}
    donors = [
        lender("allow", competent=passed),
        lender("deny", rules="q", competent=passed),
        lender("deny", field="g", competent=False),
        lender("allow", field="g", rules="q"),
        lender("allow", refilled=True),
    ]
    logits = {
        "arms": {"cosine": 0.5, "centred": 0.0, "argmax kept": False},
        "drift": {"cosine": [0.9, 0.7], "centred": [0.8, 0.6], "argmax kept": [True, False]},
    }
    tests = {"aggregators": found, "permuted": drawn, "wrong": {"note_swap": {"by": [[1, None]], "margins": [[-1.0]]}}}
    measures = {"fold": fold, "donors": donors, "tests": tests, "logits": logits}
    return measured(name, base=-1.0, target=3.0, measures=measures, passed=passed, kind="polarity")


def test_summary_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [
        instance("a", fold=0, drift=(-1.0, 1.0), note=(3.0, -1.0), rest=(-1.0, 0.0), random=(-1.0, 3.0)),
        instance("b", fold=1, drift=(-2.0, -1.0), note=(1.0, -1.0), rest=(2.0, 0.0), random=(-1.0, -1.0)),
        instance(
            "c", fold=1, drift=(-1.0, -1.0), note=(3.0, 3.0), rest=(-1.0, -1.0), random=(-1.0, -1.0), passed=False
        ),
    ]
    summary = scrubbing.summarise(rows, config(tmp_path), floor=1e-6)
    found = {(one.name, one.gated): one for one in summary.effects}
    assert found["drift", True].estimate == pytest.approx((1.0 - 0.5) / 8)  # means over two lenders: 1 and -0.5
    assert found["drift_size", True].estimate == pytest.approx((1.0 + 0.5) / 8)
    assert found["note_swap", True].estimate == pytest.approx((4 + 2) / 8)  # the second lender fails the gate
    assert found["rest_swap", True].estimate == pytest.approx((0 + 3) / 8)
    assert found["note_minus_rest", True].estimate == pytest.approx((4 - 1) / 8)
    assert found["note_over_rest", True].estimate == pytest.approx(0.5)
    assert found["flips_note_swap", True].estimate == 1.0
    assert found["flips_rest_swap", True].estimate == 0.5
    assert found["note_swap", False].estimate == pytest.approx((2 + 1 + 4) / 12)  # both lenders count
    assert found["note_swap_random", True].estimate == pytest.approx((2 + 0) / 8)
    assert found["note_swap_random", True].control
    assert found["note_swap_random", True].test is None  # it may have some of the note
    assert found["cosine", True].estimate == pytest.approx(0.8)
    assert found["cosine_arms", True].estimate == pytest.approx(0.5)
    assert found["argmax_kept", True].estimate == pytest.approx(0.5)
    assert found["note_swap_any_slot", True].estimate is None
    tables = summary.tables
    assert tables["by instance"].rows[0][:6] == ["a", "a", 0.25, 1.0, 0.0, 1.0]
    # folds: 4 + 2 against the permutations 0 + 0 and 4 + 0
    assert tables["against drawn notes"].rows[0][:7] == ["aggregators", 2, 0.75, 0.25, 0.5, 2, pytest.approx(1 / 3)]
    kinds = {row[0]: row[1:4] for row in tables["by lender"].rows}
    assert kinds["same conclusion, other field and rules"][:2] == [2, pytest.approx(-1 / 8)]
    assert kinds["same conclusion, other neutral rules"][:2] == [2, pytest.approx(2 / 8)]
    assert kinds["other conclusion, other rules"] == [2, None, 0.75]
    assert "note of aggregators 0.75, all but it 0.38, drift 0.06 (n=2)" in summary.headline


def test_drawn_notes_need_no_classmates_but_enough_scenarios(tmp_path, monkeypatch):
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    asked: dict[str, Any] = {"drift": (0.0, 0.0), "note": (3.0, 3.0), "rest": (0.0, 0.0), "random": (1.0, 3.0)}
    rows = [instance(name, fold=at, **asked) for at, name in enumerate("ab")]

    def table():
        return scrubbing.summarise(rows, config(tmp_path), floor=1e-6).tables["against drawn notes"].rows

    del rows[0].measures["tests"]["wrong"]
    # p: the second permutation moves as much
    assert table() == [["aggregators", 2, 1.0, 0.75, 1.0, 2, pytest.approx(2 / 3), 0.0]]
    del rows[1].measures["tests"]["wrong"]
    assert table()[0][-1] is None
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 3)
    assert table() == []


def test_the_figure_shows_every_panel_and_says_where_there_is_nothing_to_show(planted):
    from figures import scrubbing as figures
    from figures import style

    record, folder = planted(DRAWN)
    none = make_record(included=0, gated=3).model_copy(update={"study": "scrubbing"})
    with style.styled():
        drawn = figures.draw({"m/scrubbing/a": record, "m/scrubbing/b": none})
    left, one, two, cosines = drawn["m/scrubbing/a"].axes
    assert len(left.get_yticklabels()) == len(figures.ROWS)
    assert "0.70 [" in " ".join(label.get_text() for label in left.texts).replace("  ", " ")  # planted: notes carry 0.7
    assert "moves more in 12" in one.get_xlabel()
    assert len([line for line in two.lines if line.get_marker() == "o"]) == 2 * 12
    assert len(cosines.get_yticklabels()) == len(figures.COSINES)
    assert "No recovery to report" in drawn["m/scrubbing/b"].axes[0].get_title("left")
    assert list(folder.rglob("*.png"))
