"""The weights of the planted models: a Llama whose every working number is set by hand.

The residual stream is a list of named channels. One of them holds a constant so large that RMSNorm divides
by (nearly) the same number everywhere; the norms' weights undo that division, so a layer sees its channels as
they stand, and the constant as 1. Heads pick their target by a score far above all others. Where content
decides it they use the slowest RoPE planes, which do not turn within a prompt; where distance does, the
fastest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvnotes.planted import (
    BIND_HEAD,
    DIRECT_GATHER_HEAD,
    DIRECT_HEAD,
    GATHER_HEAD,
    HEADS,
    LAYERS,
    MARK_HEAD,
    READ_HEADS,
    READ_LAYER,
    WRITE_HEAD,
    PlantedSpec,
    Site,
)
from kvnotes.planted_words import (
    BOS,
    EOS,
    FIRST_NOTE,
    IS,
    PAD,
    SCENARIOS,
    SECOND_NOTE,
    UNK,
    vocabulary,
)

D_MODEL, D_HEAD, D_MLP = 128, 32, 16
CONTEXT = 8192
ROPE_THETA = 1e9
BIG = 256.0  # the constant channel; other channels' squares add up to under 20, so the norm moves under 2e-4
SEED = 20260

VALUES = ("value0", "value1", "value2")  # what a value word is
HELD = ("held0", "held1", "held2")  # the field's value, copied to another position
NOTES = ("first_note", "second_note")  # flags of the two delimiters
CHANNELS = (
    "one",  # the constant
    "bos",
    "is",
    "is_action",
    "is_value",
    *NOTES,
    "decision",  # flag of the answer's word
    "action",  # +1 permit, -1 restrict, on action words
    *VALUES,
    "is_field",  # a value word after `=`
    "bound",  # a rule's value word: the action of its rule
    *HELD,
    "note",  # the conclusion, at a note delimiter
    "vote",  # the conclusions before they are weighed, in `and`
    "decided",  # the conclusion, at the decision; read by the unembedding
    *(f"scenario.{scenario.name}" for scenario in SCENARIOS),
)
AT = {name: index for index, name in enumerate(CHANNELS)}
IDENTITY = slice(len(CHANNELS), D_MODEL)  # what else tells words apart; read by idle heads only

SINK, HIT = 40.0, 80.0  # scores, in nats, of the BOS when a head has nothing to read, and of what it reads
NEAR = 7  # fastest RoPE planes that measure distance: their sum falls by 0.49 or more off the right one
NEAR_GAIN = 200.0
NEAR_SINK = (NEAR - 0.25) * NEAR_GAIN  # halfway between the right distance and the next best one

SCENARIO_LOGIT, DECIDED_LOGIT = 10.0, 2.0  # right 12, wrong 8, other scenarios' words 2 at most
SHARPNESS = 64.0  # of the SiLU used as a ramp


@dataclass(frozen=True, kw_only=True)
class _Near:
    """Look `distance` tokens back for a token with the flag `key`, where the query has the flag `query`."""

    query: str
    key: str
    distance: int


@dataclass(frozen=True, kw_only=True)
class _Head:
    """A head. The score is the sum of query x key over `matches`, `near` and the BOS sink.

    Queries and keys are weights by channel; `moves` lists (source channel at the key, destination channel at
    the query, weight).
    """

    site: Site
    moves: tuple[tuple[str, str, float], ...]
    matches: tuple[tuple[Mapping[str, float], Mapping[str, float]], ...] = ()
    near: _Near | None = None

    @property
    def scores(self) -> tuple[tuple[Mapping[str, float], Mapping[str, float]], ...]:
        sink = SINK if self.near is None else NEAR_SINK
        return (({"one": sink}, {"bos": 1.0}), *self.matches)


def _gather(site: Site, flags: tuple[str, ...]) -> _Head:
    """Copy the field's value to the positions that have one of the flags."""
    return _Head(
        site=site,
        matches=((dict.fromkeys(flags, HIT), {"is_field": 1.0}),),
        moves=tuple((value, held, 1.0) for value, held in zip(VALUES, HELD, strict=True)),
    )


def _look_up(site: Site, *, to: str, weight: float, closed_to: tuple[str, ...]) -> _Head:
    """Where a value is held, attend to the rule that names it (never to the field) and copy its action."""
    shut = dict.fromkeys(closed_to, -HIT)
    return _Head(
        site=site,
        matches=tuple(
            ({held: HIT, **shut}, {value: 1.0, "is_field": -1.0}) for value, held in zip(VALUES, HELD, strict=True)
        ),
        moves=(("bound", to, weight),),
    )


def _plan(spec: PlantedSpec) -> tuple[_Head, ...]:
    """The working heads of a planted model."""
    result = "vote" if spec.kind == "and" else "decided"
    flags = NOTES[: len(spec.notes)]
    heads = [
        _Head(
            site=MARK_HEAD,
            near=_Near(query="is_value", key="is", distance=1),
            moves=(("is", "is_field", 1.0),),
        ),
        _Head(
            site=BIND_HEAD,
            near=_Near(query="is_value", key="is_action", distance=2),
            moves=(("action", "bound", 1.0),),
        ),
    ]
    if spec.notes:
        heads.append(_gather(GATHER_HEAD, flags))
        heads.append(_look_up(WRITE_HEAD, to="note", weight=1.0, closed_to=("decision",)))
    if spec.direct:
        heads.append(_gather(DIRECT_GATHER_HEAD, ("decision",)))
        heads.append(_look_up(DIRECT_HEAD, to=result, weight=spec.direct, closed_to=NOTES))
    for site, flag, weight in zip(READ_HEADS, flags, spec.notes, strict=False):
        reads = ({"decision": HIT}, {flag: 1.0})
        heads.append(_Head(site=site, matches=(reads,), moves=(("note", result, weight),)))
    return tuple(heads)


class _Slots:
    """Hands out a KV head's dimensions; query heads that share it must not share one."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, int, str], int] = defaultdict(int)

    def content(self, layer: int, kv_head: int) -> int:
        """The next dimension of a RoPE plane slow enough to stand still, slowest first."""
        used = self._take(layer, kv_head, "content")
        plane = D_HEAD // 2 - 1 - used // 2
        return plane + (used % 2) * D_HEAD // 2

    def value(self, layer: int, kv_head: int) -> int:
        return self._take(layer, kv_head, "value")

    def _take(self, layer: int, kv_head: int, what: str) -> int:
        used = self._used[layer, kv_head, what]
        self._used[layer, kv_head, what] += 1
        return used


class _Weights:
    """A model's weight tensors by layer and part, to be written in place."""

    def __init__(self, net: LlamaForCausalLM) -> None:
        self.all: dict[str, torch.Tensor] = net.state_dict()
        self.embedding = self.all["model.embed_tokens.weight"]
        self.unembedding = self.all["lm_head.weight"]

    def part(self, layer: int, part: str) -> torch.Tensor:
        """A layer's projection, as in `part(2, "mlp.up_proj")`: [out, in]."""
        return self.all[f"model.layers.{layer}.{part}.weight"]

    def rows(self, layer: int, part: str, head: int) -> torch.Tensor:
        """The part of `q_proj`, `k_proj` or `v_proj` that makes one head's vectors: [d_head, d_model]."""
        return self.part(layer, f"self_attn.{part}")[head * D_HEAD : (head + 1) * D_HEAD]


def _fill(row: torch.Tensor, weights: Mapping[str, float], scale: float = 1.0) -> None:
    for channel, weight in weights.items():
        row[AT[channel]] = weight * scale


def _plant_near(near: _Near, *, q: torch.Tensor, k: torch.Tensor) -> None:
    """Distance by rotation: the query lags each plane by `distance` turns, so that scores peak just there."""
    gain = NEAR_GAIN * math.sqrt(D_HEAD)
    for plane in range(NEAR):
        turn = near.distance * ROPE_THETA ** (-2 * plane / D_HEAD)
        k[plane, AT[near.key]] = 1.0
        q[plane, AT[near.query]] = gain * math.cos(turn)
        q[plane + D_HEAD // 2, AT[near.query]] = -gain * math.sin(turn)


def _plant_heads(weights: _Weights, spec: PlantedSpec) -> None:
    plan = _plan(spec)
    for head in plan:  # all are cleared first, since query heads of one group share a KV head
        layer, kv_head = head.site.layer, spec.kv_head(head.site)
        weights.rows(layer, "q_proj", head.site.head).zero_()
        weights.rows(layer, "k_proj", kv_head).zero_()
        weights.rows(layer, "v_proj", kv_head).zero_()
    slots = _Slots()
    for head in plan:
        _plant_head(weights, head, kv_head=spec.kv_head(head.site), slots=slots)


def _plant_head(weights: _Weights, head: _Head, *, kv_head: int, slots: _Slots) -> None:
    layer = head.site.layer
    q = weights.rows(layer, "q_proj", head.site.head)
    k, v = weights.rows(layer, "k_proj", kv_head), weights.rows(layer, "v_proj", kv_head)
    for query, key in head.scores:
        dim = slots.content(layer, kv_head)
        _fill(q[dim], query, scale=math.sqrt(D_HEAD))
        _fill(k[dim], key)
    if head.near is not None:
        _plant_near(head.near, q=q, k=k)
    output = weights.part(layer, "self_attn.o_proj")
    for source, destination, weight in head.moves:
        dim = slots.value(layer, kv_head)
        _fill(v[dim], {source: 1.0})
        output[AT[destination], head.site.head * D_HEAD + dim] = weight


def _plant_majority(weights: _Weights) -> None:
    """decided = vote v clipped to [-1, 1], for votes of -3, -1, 1, 3.

    That is half of r(v+1) - r(v-1) - r(1-v) + r(-v-1), with SiLU as the ramp r; it is odd in v, so that
    nothing is written where there is no vote.
    """
    gate, up, down = (weights.part(READ_LAYER, f"mlp.{part}_proj") for part in ("gate", "up", "down"))
    gate.zero_()
    up.zero_()
    for unit, (slope, shift, sign) in enumerate([(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]):
        _fill(gate[unit], {"vote": slope, "one": shift}, scale=SHARPNESS)
        _fill(up[unit], {"one": 1.0})
        down[AT["decided"], unit] = sign / (2 * SHARPNESS)


def _words() -> dict[str, dict[str, float]]:
    """The channels that each word's embedding sets, but for the constant and the identity."""
    words: dict[str, dict[str, float]] = {
        BOS: {"bos": 1.0},
        IS: {"is": 1.0},
        FIRST_NOTE: {"first_note": 1.0},
        SECOND_NOTE: {"second_note": 1.0},
    }
    for scenario in SCENARIOS:
        words[scenario.permit] = {"is_action": 1.0, "action": 1.0}
        words[scenario.restrict] = {"is_action": 1.0, "action": -1.0}
        words[scenario.answer] = {"decision": 1.0, f"scenario.{scenario.name}": 1.0}
        for word, code in zip(scenario.values, VALUES, strict=True):
            words[word] = {"is_value": 1.0, code: 1.0}
    return words


def _plant_words(weights: _Weights, generator: torch.Generator) -> None:
    embedding, unembedding = weights.embedding, weights.unembedding
    ids = {word: index for index, word in enumerate(vocabulary())}
    signs = torch.randint(0, 2, embedding[:, IDENTITY].shape, generator=generator) * 2 - 1
    embedding[:, IDENTITY] = 0.25 * signs
    embedding[:, AT["one"]] = BIG
    for word, channels in _words().items():
        _fill(embedding[ids[word]], channels)
    for scenario in SCENARIOS:
        named = {f"scenario.{scenario.name}": SCENARIO_LOGIT}
        _fill(unembedding[ids[scenario.permit]], {**named, "decided": DECIDED_LOGIT})
        _fill(unembedding[ids[scenario.restrict]], {**named, "decided": -DECIDED_LOGIT})
    _fill(unembedding[ids[EOS]], {"is_action": SCENARIO_LOGIT})  # the answer is one word


def _plant_rest(weights: _Weights, generator: torch.Generator) -> None:
    """Norms, and what works of the idle parts.

    Norms undo the division by the root mean square, BIG / sqrt(d_model), and bring the constant to 1. Idle
    heads attend and idle MLPs compute something, but nothing of it is written.
    """
    for name, weight in weights.all.items():
        if "norm" in name:
            weight.fill_(BIG / math.sqrt(D_MODEL))
            weight[AT["one"]] = 1 / math.sqrt(D_MODEL)
        elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            weight.normal_(std=0.3, generator=generator)
        else:
            weight.zero_()


def config(spec: PlantedSpec) -> LlamaConfig:
    """The Hugging Face configuration; `planted` in it holds the kind and the notes' share."""
    specials = {word: index for index, word in enumerate(vocabulary()) if word in (PAD, BOS, EOS)}
    made = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=D_MODEL,
        intermediate_size=D_MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=spec.kv_heads,
        head_dim=D_HEAD,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        pad_token_id=specials[PAD],
        bos_token_id=specials[BOS],
        eos_token_id=specials[EOS],
        dtype="float32",
    )
    made.update({"planted": {"kind": spec.kind, "alpha": spec.alpha}})
    return made


@torch.no_grad()
def model(spec: PlantedSpec) -> LlamaForCausalLM:
    """The planted model in memory, float32, on the CPU; the same weights at every call."""
    with torch.random.fork_rng(devices=[]):  # the library's own initialisation, overwritten below
        net = LlamaForCausalLM(config(spec)).float().eval()
    weights = _Weights(net)
    generator = torch.Generator().manual_seed(SEED)
    _plant_rest(weights, generator)
    _plant_words(weights, generator)
    _plant_heads(weights, spec)
    if spec.kind == "and":
        _plant_majority(weights)
    return net


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, split at whitespace, a BOS in front; no chat template."""
    words = {word: index for index, word in enumerate(vocabulary())}
    backend = Tokenizer(models.WordLevel(vocab=words, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, words[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
