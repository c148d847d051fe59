"""Cells of another instance: slots matched, keys turned to where they come to stand; the conclusions that tell arms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from kvnotes import donors, models, probing
from kvnotes.cache import CacheError
from kvnotes.instance import TokenPair
from kvnotes.sweep import Trial
from tests import tiny
from tests.test_prompts import arm, pair, tokenise, tokens


def longer() -> TokenPair:
    """Two more words before the request, so that all after them stands two positions later."""
    made = tokenise(pair(arm("open", " allow", more="rule calm "), arm("shut", " deny", more="rule calm ")))
    assert isinstance(made, TokenPair)
    return made


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_a_donor_holds_what_a_trial_holds(kind, tmp_path):
    model = models.load(str(tiny.checkpoint(kind, tmp_path)), device="cpu", dtype="float32")
    made, trial = donors.fill(model, tokens()), Trial.run(model, tokens(), engine="rows", budget=10**7)
    for name, state in trial.states.items():
        assert made.states[name].length == state.length
        assert made.states[name].deviation(state, start=0, stop=state.length) < 1e-5


def test_a_lender_keeps_the_last_that_were_asked_for(monkeypatch):
    filled = []
    monkeypatch.setattr(donors, "fill", lambda model, pair: filled.append(pair.pair.id) or pair.pair.id)
    monkeypatch.setattr(donors.Lender, "KEPT", 2)
    one, two, three = (replace(tokens(), pair=replace(tokens().pair, id=name)) for name in "abc")
    lender = donors.Lender(None)
    assert lender.lend([one, two]) == ["a", "b"]
    assert lender.lend([one]) == ["a"]
    assert filled == ["a", "b"]
    assert lender.lend([three, two]) == ["c", "b"]  # b was used longest ago, so c took its place
    assert filled == ["a", "b", "c", "b"]


def test_slots_are_matched_by_name_and_never_reach_the_query():
    # 10 ; 11 what 12 to 13 do 14 answer 15 :  and  10 ; 11 rule 12 calm 13 what 14 to 15 do 16 answer 17 :
    own, other = tokens(), longer()
    assert donors.shared_slots(own, other, (5, 10, 11, 13, 14)) == {5: 5, 10: 10, 11: 11, 13: 13, 14: 16}
    assert donors.shared_slots(other, own, (13, 14, 15, 16)) == {13: 13, 16: 14}  # request[3], request[4] are not there
    assert donors.shared_slots(own, replace(other, query=(16, 17)), (14,)) == {}


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3"])
def test_aligned_cells_are_those_of_a_prompt_that_stands_where_they_go(kind, tmp_path):
    """Against plain transformers: the other prompt run at shifted positions, its keys taken as they come."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = models.load(str(folder), device="cpu", dtype="float32")
    own, other = tokens(), longer()
    mine, theirs = (donors.fill(model, one).states["base"] for one in (own, other))
    places = donors.shared_slots(own, other, own.downstream)
    made = donors.aligned(mine, theirs, places, model.rotation)
    for p in range(own.query[0]):
        shift = p - places.get(p, p)
        source, at = (other, places[p]) if p in places else (own, p)
        cache = by_hand(plain, source.base_ids, shift=shift)
        for layer, kept in zip(made.layers, cache.layers, strict=True):
            assert layer["k"][:, p] == pytest.approx(kept.keys[0, :, at], abs=1e-4)
            assert layer["v"][:, p] == pytest.approx(kept.values[0, :, at], abs=1e-4)
    assert {p - q for p, q in places.items()} == {0, -2}
    assert torch.equal(made.positions, mine.positions)


def by_hand(plain, ids, *, shift: int) -> transformers.DynamicCache:
    """A prompt's cache at positions `shift` later; the first ones may be negative, which RoPE turns as any other."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        plain(torch.tensor([ids]), past_key_values=cache, position_ids=torch.arange(len(ids))[None] + shift)
    return cache


def test_what_cannot_be_aligned_is_refused(tmp_path):
    model = models.load(str(tiny.checkpoint("llama", tmp_path)), device="cpu", dtype="float32")
    mine, theirs = (donors.fill(model, one).states["base"] for one in (tokens(), longer()))
    with pytest.raises(CacheError, match="share no slot"):
        donors.aligned(mine, theirs, {}, model.rotation)
    with pytest.raises(CacheError, match="cannot be moved"):
        donors.aligned(mine, theirs, {14: 16}, None)
    assert donors.aligned(mine, theirs, {5: 5}, None).length == mine.length


@pytest.mark.parametrize("kind", ["field", "polarity"])
def test_the_generators_conclusions_are_the_actions(kind):
    from tasks import gated
    from tasks.scenarios import SCENARIOS

    permits = {one.id: one.permit for one in SCENARIOS}
    for one in gated.generate(layout="table_field_first", pair=kind, n=32, seed=1):
        for name, made in (("base", one.base), ("target", one.target)):
            assert probing.permits(one)[name] == (made.action.strip() == permits[one.scenario])
