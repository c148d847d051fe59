"""The planted models do what their table says, measured by a plain transformers loop of our own."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvnotes.errors import KVNotesError, UnknownName
from kvnotes.instance import Pair
from kvnotes.planted import (
    ALPHA,
    DIRECT_GATHER_LAYER,
    HEADS,
    LAYERS,
    PLANTED,
    READ_LAYER,
    WRITE_LAYER,
    Site,
    build,
)
from kvnotes.planted_words import FILLERS, FRAME, SCENARIOS, vocabulary
from tasks import planted as task

TOLERANCE = 1e-3
D_HEAD = 32


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("planted")
    return {name: build(name, root / name) for name in PLANTED}


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[[str], tuple[Any, Any]]:
    @cache
    def loaded(name: str) -> tuple[Any, Any]:
        net = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager").eval()
        return net, AutoTokenizer.from_pretrained(folders[name])

    return loaded


# --- a pair as ids, and the plain loop ----------------------------------------------------------------------


@dataclass(frozen=True)
class Arms:
    base: torch.Tensor  # [1, pos]
    target: torch.Tensor
    changed: list[int]
    actions: tuple[int, int]  # base's, target's
    spans: dict[str, list[int]]

    @property
    def downstream(self) -> list[int]:
        return [p for p in range(self.changed[0], self.base.shape[1] - 1) if p not in self.changed]

    def span(self, name: str) -> list[int]:
        return self.spans[name]


def encode(tok, pair: Pair) -> Arms:
    arms = [arm.user_text + arm.answer_text for arm in (pair.base, pair.target)]
    base, target = (tok(text, return_tensors="pt")["input_ids"] for text in arms)
    assert base.shape == target.shape
    assert tok.unk_token_id not in base
    pieces = (*pair.base.user, *pair.base.answer)
    assert base.shape[1] == 1 + len(pieces)  # BOS, then one token a piece
    spans: dict[str, list[int]] = {}
    for position, piece in enumerate(pieces, start=1):
        spans.setdefault(piece.span, []).append(position)
    changed = torch.nonzero(base[0] != target[0]).flatten().tolist()
    actions = [tok(arm.action, add_special_tokens=False)["input_ids"] for arm in (pair.base, pair.target)]
    assert [len(ids) for ids in actions] == [1, 1]
    return Arms(base, target, changed, (actions[0][0], actions[1][0]), spans)


@torch.no_grad()
def prefill(net, ids: torch.Tensor) -> DynamicCache:
    cache_ = DynamicCache(config=net.config)
    net(ids[:, :-1], past_key_values=cache_)
    return cache_


def edit(into: DynamicCache, source: DynamicCache, positions: Iterable[int], *, layers=range(LAYERS), kv=None):
    result = copy.deepcopy(into)
    where = list(positions)
    heads = slice(None) if kv is None else slice(kv, kv + 1)
    for layer in layers:
        for name in ("keys", "values"):
            ours, theirs = getattr(result.layers[layer], name), getattr(source.layers[layer], name)
            ours[:, heads, where] = theirs[:, heads, where]
    return result


@torch.no_grad()
def margin(net, arms: Arms, state: DynamicCache) -> float:
    logits = net(arms.base[:, -1:], past_key_values=copy.deepcopy(state)).logits[0, -1]
    return (logits[arms.actions[1]] - logits[arms.actions[0]]).item()


class Loop:
    """Both arms of a pair prefilled up to the last token; recoveries of cache edits and z patches."""

    def __init__(self, net, tok, pair: Pair) -> None:
        self.net, self.arms = net, encode(tok, pair)
        self.base, self.target = prefill(net, self.arms.base), prefill(net, self.arms.target)
        self.m_base, self.m_target = (margin(net, self.arms, each) for each in (self.base, self.target))

    def recovery(self, value: float) -> float:
        return (value - self.m_base) / (self.m_target - self.m_base)

    def cells(self, positions: Iterable[int], **which) -> float:
        return self.recovery(margin(self.net, self.arms, edit(self.base, self.target, positions, **which)))

    @torch.no_grad()
    def z(self, sites: Iterable[Site], positions: list[int]) -> float:
        """z of query heads at some positions from the target's full forward, all after it recomputed."""
        sites = list(sites)
        captured: dict[int, torch.Tensor] = {}

        def capture(layer: int):
            return lambda module, args: captured.__setitem__(layer, args[0].clone())

        def patch(layer: int):
            def hook(module, args):
                z = args[0].clone()
                for site in sites:
                    if site.layer == layer:
                        at = slice(site.head * D_HEAD, (site.head + 1) * D_HEAD)
                        z[:, positions, at] = captured[layer][:, positions, at]
                return (z,)

            return hook

        layers = {site.layer for site in sites}
        self._hooked(self.arms.target, {layer: capture(layer) for layer in layers})
        logits = self._hooked(self.arms.base, {layer: patch(layer) for layer in layers})
        return self.recovery((logits[self.arms.actions[1]] - logits[self.arms.actions[0]]).item())

    def _hooked(self, ids: torch.Tensor, hooks: dict[int, Callable]) -> torch.Tensor:
        projections = {layer: self.net.model.layers[layer].self_attn.o_proj for layer in hooks}
        handles = [projections[layer].register_forward_pre_hook(hook) for layer, hook in hooks.items()]
        try:
            return self.net(ids).logits[0, -1]
        finally:
            for handle in handles:
                handle.remove()


def pairs(kind, layout=task.DEFAULT_LAYOUT, n=4, seed=0, length=0) -> list[Pair]:
    return task.generate(layout=layout, pair=kind, n=n, seed=seed, length=length)


def near(value: float):
    return pytest.approx(value, abs=TOLERANCE)


# --- the table, by hand -------------------------------------------------------------------------------------

HAND = {  # kind: field-only, notes-only, first note alone, second note alone, all but first, all but second
    "notes": (0, 1, 1, 0, 0, 1),
    "direct": (1, 0, 0, 0, 0, 0),
    "mixed": (0.3, 0.7, 0.7, 0, 0, 0.7),
    "both": (0, 1, 0.5, 0.5, 0.5, 0.5),
    "and": (0, 1, 0, 0, 0, 0),
}


def test_there_are_five_kinds_each_with_and_without_shared_kv_heads():
    kinds = {spec.kind for spec in PLANTED.values()}
    assert kinds == set(HAND)
    assert set(PLANTED) == {f"planted-{kind}{tail}" for kind in kinds for tail in ("", "-gqa")}
    assert ALPHA == 0.7


@pytest.mark.parametrize("name", PLANTED)
def test_the_expected_table_is_the_hand_worked_one(name):
    expected = PLANTED[name].expected
    field, notes, *cells = HAND[PLANTED[name].kind]
    assert expected["locality"] == pytest.approx({"field_only": field, "notes_only": notes, "full_downstream": 1})
    order = ("first_note", "second_note", "without_first_note", "without_second_note")
    assert [expected["suffix"][key] for key in order] == pytest.approx(cells)


@pytest.mark.parametrize("kind", ["field", "polarity"])
@pytest.mark.parametrize("layout", task.LAYOUTS)
@pytest.mark.parametrize("name", PLANTED)
def test_cache_edits_recover_what_the_table_says(load, name, layout, kind):
    spec = PLANTED[name]
    for pair in pairs(kind, layout):
        loop = Loop(*load(name), pair=pair)
        arms = loop.arms
        locality, suffix = spec.expected["locality"], spec.expected["suffix"]
        assert loop.m_target - loop.m_base == pytest.approx(8, abs=0.02)  # 2 x 2 x 2 logits
        assert loop.cells([]) == 0
        assert loop.cells(arms.changed) == near(locality["field_only"])
        assert loop.cells(arms.downstream) == near(locality["notes_only"])
        assert loop.cells(arms.changed + arms.downstream) == pytest.approx(1, abs=1e-6)
        for span, key in (("delimiter.first_note", "first_note"), ("delimiter.second_note", "second_note")):
            note = arms.span(span)
            rest = [p for p in arms.downstream if p not in note]
            assert loop.cells(note) == near(suffix[key])
            assert loop.cells(rest) == near(suffix[f"without_{key}"])
        notes = arms.span("delimiter.first_note") + arms.span("delimiter.second_note")
        assert loop.cells(notes) == near(locality["notes_only"])  # jointly they are all there is
        trigger = spec.expected["dissociation"]["trigger_only"]
        assert kind == "field" or loop.cells(arms.span("trigger.base") + arms.span("trigger.target")) == near(trigger)


@pytest.mark.parametrize("kind", ["field", "polarity"])
@pytest.mark.parametrize("name", PLANTED)
def test_no_other_position_has_an_effect(load, name, kind):
    for pair in pairs(kind, n=1):
        loop = Loop(*load(name), pair=pair)
        notes = loop.arms.span("delimiter.first_note") + loop.arms.span("delimiter.second_note")
        effects = {p: loop.cells([p]) for p in loop.arms.downstream if p not in notes}
        assert max(map(abs, effects.values())) < TOLERANCE


@pytest.mark.parametrize("name", ["planted-notes", "planted-notes-gqa", "planted-both", "planted-both-gqa"])
def test_only_the_read_heads_own_kv_heads_matter_and_only_at_the_read_layer(load, name):
    spec = PLANTED[name]
    loop = Loop(*load(name), pair=pairs("polarity", n=1)[0])
    found = {
        (layer, kv): loop.cells(loop.arms.downstream, layers=[layer], kv=kv)
        for layer in range(LAYERS)
        for kv in range(spec.kv_heads)
    }
    sites = {(READ_LAYER, spec.kv_head(site)) for site in spec.read_heads}
    # notes: KV head 3 of 4, or 1 of 2. both: 3 and 2 of 4, or both read heads from 1 of 2.
    hand = {"planted-notes": {3}, "planted-notes-gqa": {1}, "planted-both": {2, 3}, "planted-both-gqa": {1}}
    assert sites == {(4, kv) for kv in hand[name]}
    for site, effect in found.items():
        assert effect == near(1 / len(sites) if site in sites else 0), site


def test_direct_reads_the_field_one_layer_before_the_rule(load):
    loop = Loop(*load("planted-direct-gqa"), pair=pairs("field", n=1)[0])
    alone = [loop.cells(loop.arms.changed, layers=[layer]) for layer in range(LAYERS)]
    assert alone == [near(int(layer == DIRECT_GATHER_LAYER)) for layer in range(LAYERS)]


@pytest.mark.parametrize("layout", task.LAYOUTS)
@pytest.mark.parametrize("name", PLANTED)
def test_every_cell_of_the_design_is_right_over_the_whole_vocabulary(load, name, layout):
    net, tok = load(name)
    for pair in pairs("polarity", layout, n=2 * len(SCENARIOS), seed=3):
        arms = encode(tok, pair)
        with torch.no_grad():
            logits = net(torch.cat([arms.base, arms.target])).logits[:, -1]
        assert logits.argmax(-1).tolist() == list(arms.actions)
        right = logits[0, arms.actions[0]] - logits[0, arms.actions[1]]
        assert right.item() == pytest.approx(4, abs=0.01)
        assert logits[0].softmax(-1).max().item() > 0.95


# --- heads, depths, direction -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_z_patches_at_the_decision_find_the_named_read_heads(load, name):
    spec, heads = PLANTED[name], PLANTED[name].expected["heads"]
    loop = Loop(*load(name), pair=pairs("polarity", n=1)[0])
    last = [loop.arms.base.shape[1] - 1]
    sites = [Site(layer=layer, head=head) for layer in range(LAYERS) for head in range(HEADS)]
    alone = {site: loop.z([site], last) for site in sites}
    for head in (3, 2, 1):  # of the first note, of the second, the direct one
        assert alone.pop(Site(layer=4, head=head)) == near(heads.get(f"head_4.{head}", 0.0))
    assert max(map(abs, alone.values())) < TOLERANCE
    assert loop.z(spec.read_heads, last) == near(heads["all_heads"])


@pytest.mark.parametrize("name", PLANTED)
def test_z_patches_at_the_notes_find_the_named_write_head(load, name):
    spec, heads = PLANTED[name], PLANTED[name].expected["heads"]
    loop = Loop(*load(name), pair=pairs("polarity", n=1)[0])
    first = loop.arms.span("delimiter.first_note")
    notes = first + loop.arms.span("delimiter.second_note")
    writer = Site(layer=WRITE_LAYER, head=1)
    assert spec.write_head == (writer if spec.notes else None)
    assert loop.z([writer], first) == near(heads["write_1"])
    assert loop.z([writer], notes) == near(heads.get("write_all_1", float(bool(spec.notes))))
    others = [Site(layer=layer, head=head) for layer in range(LAYERS) for head in range(HEADS)]
    others.remove(writer)
    assert max(abs(loop.z([site], notes)) for site in others) < TOLERANCE


@torch.no_grad()
def residuals(net, ids: torch.Tensor) -> torch.Tensor:
    """[layer + 1, pos, d_model]: the embedding, then the residual after each layer, before the final norm."""
    seen: list[torch.Tensor] = []
    handles = [layer.register_forward_pre_hook(lambda m, args: seen.append(args[0][0])) for layer in net.model.layers]
    handles.append(net.model.norm.register_forward_pre_hook(lambda m, args: seen.append(args[0][0])))
    net(ids)
    for handle in handles:
        handle.remove()
    return torch.stack(seen)


@pytest.mark.parametrize("name", ["planted-notes", "planted-both-gqa", "planted-and"])
def test_the_note_is_one_shared_direction_written_at_the_write_layer(load, name):
    net, tok = load(name)
    for pair in pairs("polarity", n=6):
        arms = encode(tok, pair)
        note = arms.span("delimiter.first_note")[0]
        gap = (residuals(net, arms.target) - residuals(net, arms.base))[:, note]
        assert gap[: WRITE_LAYER + 1].abs().max() < TOLERANCE  # up to the write layer's input
        sign = 2 if pair.target.action in {each.permit for each in SCENARIOS} else -2
        written = torch.zeros(128)
        written[torch.argmax(gap[WRITE_LAYER + 1].abs())] = sign
        for after in gap[WRITE_LAYER + 1 :]:
            assert after == pytest.approx(written, abs=TOLERANCE)


@pytest.mark.parametrize("name", PLANTED)
def test_the_difference_of_means_of_other_scenarios_recovers_what_the_notes_carry(load, name):
    net, tok = load(name)
    expected = PLANTED[name].expected["direction"]
    permits = {each.permit for each in SCENARIOS}
    first, *others = [p for p in pairs("polarity", n=8) if p.base.action in permits]
    gaps = []
    for pair in others:  # every base permits and every target restricts
        arms = encode(tok, pair)
        note = arms.span("delimiter.first_note")[0]
        gaps.append((residuals(net, arms.target) - residuals(net, arms.base))[WRITE_LAYER + 1, note])
    direction = torch.stack(gaps).mean(0)
    arms = encode(tok, first)
    one = arms.span("delimiter.first_note")
    for positions, key in ((one, "along"), (one + arms.span("delimiter.second_note"), "along_all")):
        at = torch.zeros(arms.base.shape[1], 1)
        at[positions] = 1
        handle = net.model.layers[WRITE_LAYER].register_forward_hook(
            lambda module, args, out, at=at: out + at * direction
        )
        with torch.no_grad():
            injected = net(arms.base).logits[0, -1]
        handle.remove()
        with torch.no_grad():
            ends = [net(ids).logits[0, -1] for ids in (arms.base, arms.target)]
        margins = [(each[arms.actions[1]] - each[arms.actions[0]]).item() for each in (injected, *ends)]
        assert (margins[0] - margins[1]) / (margins[2] - margins[1]) == near(expected[key])


@pytest.mark.parametrize("name", PLANTED)
def test_mlps_write_only_where_and_counts_its_votes(load, name):
    net, _ = load(name)
    written = [layer.mlp.down_proj.weight.abs().max().item() > 0 for layer in net.model.layers]
    assert written == [PLANTED[name].kind == "and" and layer == READ_LAYER for layer in range(LAYERS)]


@pytest.mark.parametrize("name", PLANTED)
def test_the_logit_lens_commits_at_the_read_layer(load, name):
    net, tok = load(name)
    arms = encode(tok, pairs("polarity", n=1)[0])
    lens = net.lm_head(net.model.norm(residuals(net, arms.base)[:, -1]))
    margins = (lens[:, arms.actions[0]] - lens[:, arms.actions[1]]).tolist()
    assert margins == [pytest.approx(4 if layer > READ_LAYER else 0, abs=0.01) for layer in range(LAYERS + 1)]


# --- the folder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["planted-mixed", "planted-and-gqa"])
def test_a_folder_is_the_same_bytes_every_time(folders, tmp_path, name):
    again = build(name, tmp_path / "again")
    files = {path.name for path in again.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
    for file in files:
        assert (again / file).read_bytes() == (folders[name] / file).read_bytes(), file


def test_a_saved_model_keeps_its_shape_and_its_share(load):
    net, tok = load("planted-mixed-gqa")
    assert (net.config.num_attention_heads, net.config.num_key_value_heads) == (4, 2)
    assert net.config.planted == {"kind": "mixed", "alpha": 0.7}
    assert net.dtype == torch.float32
    assert len(tok) == net.config.vocab_size == len(vocabulary())


def test_building_leaves_the_callers_random_numbers_alone(tmp_path):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    build("planted-notes", tmp_path / "m")
    assert torch.equal(torch.rand(3), wanted)


def test_the_tokenizer_has_one_bos_true_offsets_and_reads_back(load):
    _, tok = load("planted-notes")
    pair = pairs("field", n=1)[0]
    text = pair.base.user_text + pair.base.answer_text
    coded = tok(text, return_offsets_mapping=True)
    assert coded["input_ids"].count(tok.bos_token_id) == 1 == 1 + coded["input_ids"].index(tok.bos_token_id)
    pieces = [piece.text.strip() for piece in (*pair.base.user, *pair.base.answer)]
    assert [text[start:end] for start, end in coded["offset_mapping"][1:]] == pieces
    assert tok.decode(coded["input_ids"], skip_special_tokens=True) == text.strip()
    with_action = tok(text + pair.base.action)["input_ids"]
    assert with_action[:-1] == coded["input_ids"]
    assert tok.chat_template is None


def test_greedy_decoding_gives_the_action_and_stops(load):
    net, tok = load("planted-notes-gqa")
    pair = pairs("field", n=1)[0]
    ids = tok(pair.target.user_text + pair.target.answer_text, return_tensors="pt")["input_ids"]
    new = net.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    assert tok.convert_ids_to_tokens(new.tolist()) == [pair.target.action, "<eos>"]


def test_an_unknown_planted_model_is_named_with_the_nearest(tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'planted-notes'"):
        build("planted-note", tmp_path)


def test_specs_and_tasks_need_no_torch():
    code = "import sys, kvnotes.planted, tasks.planted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["planted-notes", "planted-and-gqa"])
def test_transformer_lens_boots_it_with_equal_logits(folders, load, name):
    from transformer_lens.model_bridge import TransformerBridge

    net, tok = load(name)
    ids = encode(tok, pairs("field", n=1)[0]).base
    with torch.no_grad():
        plain = net(ids).logits
    own = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager").eval()
    bridge = TransformerBridge.boot_transformers(
        str(folders[name]), hf_model=own, tokenizer=tok, device="cpu", dtype=torch.float32
    )
    with torch.no_grad():
        lensed = bridge(ids)
    assert torch.allclose(lensed, plain, atol=1e-5)
    _, activations = bridge.run_with_cache(ids)
    assert activations["blocks.4.attn.hook_z"].shape == (1, ids.shape[1], HEADS, D_HEAD)
    kv = PLANTED[name].kv_heads
    assert activations["blocks.4.attn.hook_v"].shape == (1, ids.shape[1], kv, D_HEAD)


# --- the task -----------------------------------------------------------------------------------------------


def test_no_word_means_two_things():
    values = [value for each in SCENARIOS for value in each.values]
    actions = [action for each in SCENARIOS for action in (each.permit, each.restrict)]
    names = [word for each in SCENARIOS for word in (each.name, each.answer)]
    meaning = values + actions + names + list(FRAME)
    assert len(meaning) == len(set(meaning))
    idle = {word for text in (*FILLERS, *(each.request for each in SCENARIOS)) for word in text.split()}
    assert not idle & set(meaning)
    assert len(SCENARIOS) >= 12
    assert len({each.domain for each in SCENARIOS}) == len(SCENARIOS)


def test_a_prompt_reads_as_documented():
    pair = pairs("polarity", n=1)[0]
    assert pair.base.user_text.startswith(
        "state : order = open . rules : ship when open ; wait when packed ; --- note : "
    )
    assert pair.target.user_text.startswith(
        "state : order = open . rules : ship when packed ; wait when open ; --- note : "
    )
    assert pair.base.user_text.endswith(". *** note : " + pair.base.user_text.split("*** note : ")[1])
    assert (pair.base.action, pair.target.action) == ("ship", "wait")
    assert pair.base.answer_text == "order: "


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_two_pairs_of_a_group_are_one_two_by_two_design(layout):
    for kind in ("field", "polarity"):
        found = pairs(kind, layout, n=24)
        assert len({pair.id for pair in found}) == 24
        assert len({pair.scenario for pair in found}) == 12
        for first, second in zip(found[::2], found[1::2], strict=True):
            assert first.group == second.group
            cells = {(arm.field, arm.action) for pair in (first, second) for arm in (pair.base, pair.target)}
            assert len(cells) == 4
            assert {len(each.changed) for each in (first, second)} == {1 if kind == "field" else 2}


def test_choices_are_balanced_over_six_rounds():
    found = pairs("field", n=12 * 6 * 2)
    for name in ("first_row", "base_conclusion"):
        counts = [pair.balance[name] for pair in found]
        assert {counts.count(value) for value in set(counts)} == {len(found) // 2}, name
    orders = [pair.balance["field_value"] for pair in found if pair.scenario == "order"]
    assert sorted(orders) == sorted(["open", "packed", "sold"] * 4)


def test_the_key_base_names_the_row_that_the_base_follows():
    for kind in ("field", "polarity"):
        for pair in pairs(kind, n=24):
            for arm, key in ((pair.base, "base"), (pair.target, "target")):
                row = {piece.span: piece.text.strip() for piece in arm.user if piece.key == key}
                value = row.get(f"rule_value.{key}") or row[f"trigger.{key}"]
                assert (value, row[f"action.{key}"]) == (arm.field, arm.action)


@pytest.mark.parametrize("length", [60, 300, 1200])
def test_length_is_met_within_a_neutral_rule_and_the_mechanism_holds(load, length):
    net, tok = load("planted-mixed-gqa")
    pair = pairs("field", n=1, length=length)[0]
    loop = Loop(net, tok, pair)
    assert length <= loop.arms.base.shape[1] < length + 12
    assert loop.cells(loop.arms.downstream) == near(0.7)
    assert loop.cells(loop.arms.changed) == near(0.3)


def test_generation_repeats_itself_and_the_seed_changes_the_fillers():
    assert pairs("field", n=6, seed=1, length=200) == pairs("field", n=6, seed=1, length=200)
    first, second = (pairs("field", n=1, seed=seed, length=200)[0] for seed in (1, 2))
    assert first.base.user_text != second.base.user_text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "words_field_frist"}, "did you mean 'words_field_first'"),
        ({"wording": "trigger"}, "did you mean|no name like it"),
        ({"n": 0}, "at least 1"),
        ({"length": -1}, "number of tokens"),
    ],
)
def test_bad_settings_say_what_is_wrong(settings, message):
    usual = {"layout": task.DEFAULT_LAYOUT, "pair": "field", "n": 1, "seed": 0, "length": 0}
    with pytest.raises(KVNotesError, match=message):
        task.generate(**{**usual, **settings})
