"""The tools beside which the engine is timed, each answering the same interventions on the same pair.

What a peer does once a pair (its own traces, such as TransformerLens' cache of the donor) is done in `prepare` and is
not timed, as our traces are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvnotes import hooks, memory, readout
from kvnotes.cache import KVState
from kvnotes.instance import TokenPair
from kvnotes.interventions import ActivationPatch, CacheEdit, columns
from kvnotes.sweep import Trial

BATCH = 64

Intervention = Any  # a CacheEdit or an ActivationPatch, by workload
Ask = Callable[[Sequence[Intervention]], dict[str, float]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """What peers work on: a trial (its states are the two traces), and the same weights as plain transformers."""

    trial: Trial
    plain: Any | None
    caches: dict[str, Any] = field(default_factory=dict)  # TransformerLens' cache of the donor's run, by point

    @property
    def base(self) -> Tensor:
        """The base's tokens, [1, pos]."""
        return torch.tensor([self.trial.pair.base_ids], device=self.trial.model.device)

    @property
    def target(self) -> Tensor:
        """The target's tokens, [1, pos]."""
        return torch.tensor([self.trial.pair.target_ids], device=self.trial.model.device)

    @property
    def query(self) -> Tensor:
        """The query block's tokens, [1, new]."""
        return self.base[:, list(self.trial.pair.query)]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A tool on one workload. `decodes` says that it runs the query block alone, not the whole prompt."""

    name: str
    workload: str
    prepare: Callable[[Setup], Ask]
    decodes: bool = False
    plain: bool = False  # needs the plain copy of the weights
    package: str | None = None  # optional: not ours to install

    def missing(self, setup: Setup) -> str | None:
        """Why the peer cannot be run here; None where it can."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return "no memory for a second copy of the weights" if self.plain and setup.plain is None else None


@contextmanager
def plain_copy(model: Any) -> Iterator[Any | None]:
    """The model loaded once more, as plain transformers with PyTorch's own attention; None where memory is short."""
    from transformers import AutoModelForCausalLM

    need = memory.weights_bytes(
        model.prepared.folder.glob("*.safetensors"), stored=model.prepared.precision, dtype=model.dtype
    )
    if need > memory.available(model.device):
        yield None
        return
    soft = getattr(model.hf.config, "attn_logit_softcapping", None)  # which PyTorch's attention does not know
    plain: Any = AutoModelForCausalLM.from_pretrained(
        model.prepared.folder,
        dtype=model.dtype,
        attn_implementation="eager" if soft else "sdpa",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )
    yield plain.to(model.device).eval()


def _frozen_forwards(setup: Setup) -> Ask:
    """A whole bridge forward an edit, every cached key and value held by hooks, logits as the bridge gives them."""
    trial, pair = setup.trial, setup.trial.pair
    places = range(pair.query[0])

    @torch.no_grad()
    def ask(edits: Sequence[CacheEdit]) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in edits:
            points = hooks.frozen(trial.states["base"].replace(one.cells, trial.states["target"]), places)
            logits = trial.model.bridge.run_with_hooks(setup.base, fwd_hooks=points)
            found[one.name] = _margin(logits[0, -1], pair)
        return found

    return ask


def _last_logits(setup: Setup) -> Ask:
    """The same with the last token's logits only, which the bridge can be asked for: our ENGINE=hooks."""
    trial = setup.trial

    def ask(edits: Sequence[CacheEdit]) -> dict[str, float]:
        states, pair = trial.states, trial.pair
        return {one.name: _margin(hooks.answer(trial.model, one, pair=pair, states=states), pair) for one in edits}

    return ask


def _copied_caches(rows: int) -> Callable[[Setup], Ask]:
    """Plain transformers: the cache copied for every row of a batch, each row's position edited, one decode."""

    def prepare(setup: Setup) -> Ask:
        trial = setup.trial

        @torch.no_grad()
        def ask(edits: Sequence[CacheEdit]) -> dict[str, float]:
            found: dict[str, float] = {}
            for first in range(0, len(edits), rows):
                group = edits[first : first + rows]
                out = _required(setup.plain)(
                    input_ids=setup.query.expand(len(group), -1),
                    past_key_values=_edited_copies(trial, group),
                    use_cache=True,
                    logits_to_keep=1,
                )
                margins = readout.margin(out.logits[:, -1].float(), trial.pair).tolist()
                found |= {one.name: margin for one, margin in zip(group, margins, strict=True)}
            return found

        return ask

    return prepare


def _cached_decodes(setup: Setup) -> Ask:
    """One bridge decode a head, over a copied cache (a cache that is passed grows), with a hook on its z."""
    trial, bridge = setup.trial, setup.trial.model.bridge
    donor = _bridge_cache(setup, "z")

    @torch.no_grad()
    def ask(patches: Sequence[ActivationPatch]) -> dict[str, float]:
        found = {}
        for one in patches:
            logits = bridge.run_with_hooks(
                setup.query,
                fwd_hooks=[(f"blocks.{one.layer}.attn.hook_z", _put_head(donor, one))],
                past_key_values=_copy(trial.states["base"]),
                use_cache=True,
                logits_to_keep=1,
            )
            found[one.name] = _margin(logits[0, -1], trial.pair)
        return found

    return ask


def _patching(point: str) -> Callable[[Setup], Ask]:
    """TransformerLens' `generic_activation_patch` on the bridge, as it is: a whole forward a patch, with all logits."""

    def prepare(setup: Setup) -> Ask:
        import pandas
        from transformer_lens import patching

        pair, cache = setup.trial.pair, _bridge_cache(setup, point)
        setter = patching.layer_pos_head_vector_patch_setter if point == "z" else patching.layer_pos_patch_setter

        @torch.no_grad()
        def ask(patches: Sequence[ActivationPatch]) -> dict[str, float]:
            heads = [() if one.head is None else (one.head,) for one in patches]
            columns = ["layer", "pos"] if point != "z" else ["layer", "pos", "head_index"]
            rows = [(one.layer, one.position, *head) for one, head in zip(patches, heads, strict=True)]
            with _quiet(patching):
                margins: Any = patching.generic_activation_patch(
                    setup.trial.model.bridge,
                    setup.base,
                    cache,
                    lambda logits: readout.margin(logits[:, -1].float(), pair)[0],
                    setter,
                    point,
                    index_df=pandas.DataFrame(rows, columns=columns),
                )
            return {one.name: margin for one, margin in zip(patches, margins.tolist(), strict=True)}

        return ask

    return prepare


def _nnsight(setup: Setup) -> Ask:
    """nnsight: one trace a head on plain transformers, its part of the output projection's input replaced."""
    pair, width, last = setup.trial.pair, setup.trial.model.shape["d_head"], setup.trial.pair.query[-1]
    donor = _inputs_of_o_proj(setup)
    wrapped = import_module("nnsight").NNsight(_required(setup.plain))
    base = setup.base

    def one_patch(layer: int, part: slice) -> Tensor:
        with wrapped.trace(input_ids=base, use_cache=False, logits_to_keep=1):
            wrapped.model.layers[layer].self_attn.o_proj.input[:, last, part] = donor[layer][:, part]
            logits = wrapped.output.logits.save()
        return logits

    @torch.no_grad()
    def ask(patches: Sequence[ActivationPatch]) -> dict[str, float]:
        parts = [columns(one.head, width) for one in patches]
        return {
            one.name: _margin(one_patch(one.layer, part)[0, -1], pair) for one, part in zip(patches, parts, strict=True)
        }

    return ask


def _pyvene(setup: Setup) -> Ask:
    """pyvene: one IntervenableModel a head around plain transformers, its representation given, not computed again."""
    pyvene, pair = import_module("pyvene"), setup.trial.pair
    width, donor = setup.trial.model.shape["d_head"], _inputs_of_o_proj(setup)

    @torch.no_grad()
    def ask(patches: Sequence[ActivationPatch]) -> dict[str, float]:
        found = {}
        for one in patches:
            where = {"layer": one.layer, "component": "head_attention_value_output", "unit": "h.pos"}
            config = pyvene.IntervenableConfig([{**where, "intervention_type": pyvene.VanillaIntervention}])
            wrapped = pyvene.IntervenableModel(config, model=_required(setup.plain))
            _, out = wrapped(
                {"input_ids": setup.base, "logits_to_keep": 1},
                unit_locations={"base": [[[[one.head]], [[one.position]]]]},
                source_representations={
                    next(iter(wrapped.interventions)): donor[one.layer][None, :, columns(one.head, width)]
                },
            )
            found[one.name] = _margin(out.logits[0, -1], pair)
        return found

    return ask


PEERS = (
    Peer(name="frozen-cache full forwards", workload="W1", prepare=_frozen_forwards),
    Peer(name="frozen-cache forwards, last logits only", workload="W1", prepare=_last_logits),
    Peer(
        name=f"Hugging Face, batch of {BATCH}", workload="W1", prepare=_copied_caches(BATCH), decodes=True, plain=True
    ),
    Peer(name="Hugging Face, one at a time", workload="W1", prepare=_copied_caches(1), decodes=True, plain=True),
    Peer(name="TransformerLens patching", workload="W2", prepare=_patching("z")),
    Peer(name="one head a cached bridge decode", workload="W2", prepare=_cached_decodes, decodes=True),
    Peer(name="pyvene", workload="W2", prepare=_pyvene, plain=True, package="pyvene"),
    Peer(name="nnsight", workload="W2", prepare=_nnsight, plain=True, package="nnsight"),  # wraps the copy: last
    Peer(name="TransformerLens patching", workload="W3", prepare=_patching("resid_pre")),
)


def _margin(logits: Tensor, pair: TokenPair) -> float:
    return float(readout.margin(logits.float(), pair))


def _required(plain: Any | None) -> Any:
    assert plain is not None  # noqa: S101 (Peer.missing)
    return plain


def _copy(state: KVState, rows: int = 1) -> Any:
    """A state as a transformers cache of `rows` copies."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, cells in enumerate(state.layers):
        k, v = (cells[name].expand(rows, -1, -1, -1) for name in ("k", "v"))
        cache.update(k, v, layer)  # which copies
    return cache


def _edited_copies(trial: Trial, edits: Sequence[CacheEdit]) -> Any:
    """The base's cache once for each edit, with the target's cells at that edit's positions."""
    cache, device = _copy(trial.states["base"], len(edits)), trial.model.device
    row = torch.tensor([i for i, one in enumerate(edits) for _ in one.positions], device=device)
    place = torch.tensor([p for one in edits for p in one.positions], device=device)
    for layer, cells in enumerate(trial.states["target"].layers):
        cache.layers[layer].keys[row, :, place] = cells["k"][:, place].transpose(0, 1)
        cache.layers[layer].values[row, :, place] = cells["v"][:, place].transpose(0, 1)
    return cache


@torch.no_grad()
def _bridge_cache(setup: Setup, point: str) -> Any:
    """TransformerLens' cache of the donor's run, at one kind of point."""
    if point not in setup.caches:
        bridge = setup.trial.model.bridge
        found = bridge.run_with_cache(setup.target, names_filter=lambda name: name.endswith(f".hook_{point}"))
        setup.caches[point] = found[1]
    return setup.caches[point]


def _put_head(donor: Any, one: ActivationPatch) -> Callable[..., Tensor]:
    """A hook that replaces a head's z at the decode's last token."""

    def hook(z: Tensor, hook: Any) -> Tensor:
        z[:, -1, one.head] = donor[f"blocks.{one.layer}.attn.hook_z"][:, one.position, one.head]
        return z

    return hook


@torch.no_grad()
def _inputs_of_o_proj(setup: Setup) -> list[Tensor]:
    """Every head's z at the donor's last token, side by side, [1, heads x d_head] a layer, from the plain copy."""
    plain, seen = _required(setup.plain), []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, -1].clone()))
        for layer in plain.base_model.layers
    ]
    try:
        plain(setup.target, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@contextmanager
def _quiet(patching: Any) -> Iterator[None]:
    """TransformerLens' own progress bar would be drawn over ours."""
    kept, patching.tqdm = patching.tqdm, iter
    try:
        yield
    finally:
        patching.tqdm = kept
