"""Name -> verified weights -> TransformerBridge, tokenizer and identity; proved at load or refused.

The model is checked before anything uses it: the bridge against plain transformers (read before the bridge is
booted, since booting changes the wrapped model), our explicit masks and cache against both, a cached decode
against the full forward (their difference is the run's noise floor), and that cache edits and hooks move logits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import memory, planted, prompts, proofs, rows, weights
from kvnotes.cache import Cells, KVState, Rotation
from kvnotes.errors import KVNotesError, UnknownName
from kvnotes.forward import Windows, decode, prefill
from kvnotes.records import Bounded
from kvnotes.sources import disk_errors

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

CHECK_TEXT = "Current state: status is pending, channel is web. If it is pending, approve; if shipped, deny.\n"
STATEFUL = {
    "mamba": "a recurrent state-space model",
    "rwkv": "a recurrent model",
    "jamba": "a hybrid with recurrent layers",
    "bamba": "a hybrid with recurrent layers",
    "zamba": "a hybrid with recurrent layers",
    "falcon_h1": "a hybrid with recurrent layers",
    "granitemoehybrid": "a hybrid with recurrent layers",
    "nemotron_h": "a hybrid with recurrent layers",
    "recurrent_gemma": "a hybrid with recurrent layers",
    "lfm2": "a hybrid with convolution layers",
    "minimax": "a hybrid with linear attention",
    "reformer": "a model with hashed attention",
}
ALIBI = {"bloom", "mpt"}
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
FIXED_ROPE = {"default", "linear", "yarn", "llama3"}


class ModelError(KVNotesError):
    """A model that cannot be studied, with the reason, or one that failed its self-check."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A loaded, proved model: the bridge (hooks, TransformerLens names) and the same modules as `hf`."""

    name: str
    bridge: Any
    hf: Any
    twin: Any | None  # the same weights in modules that no bridge wraps: what forwards and rows run on
    tokenizer: Any
    entry: weights.ModelEntry
    prepared: weights.Prepared
    device: torch.device
    dtype: torch.dtype
    windows: Windows
    rotation: Rotation | None
    noise_floor: float = 0.0
    checks: dict[str, Bounded] = field(default_factory=dict)

    @cached_property
    def shape(self) -> dict[str, int]:
        """Layers, query heads, KV heads and widths, from the model's own config (whose attributes are slow to read)."""
        c = self.hf.config
        kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        return {
            "layers": c.num_hidden_layers,
            "heads": c.num_attention_heads,
            "kv_heads": kv_heads,
            "d_model": c.hidden_size,
            "d_head": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        }

    @cached_property
    def template(self) -> prompts.Template:
        """What the chat template puts around a user's turn."""
        return prompts.read_template(self.tokenizer, use=self.entry.chat.use, options=self.entry.chat.options)

    @property
    def tolerance(self) -> float:
        """Largest logit error that the dtype's arithmetic explains."""
        return proofs.TOLERANCE[str(self.dtype).removeprefix("torch.")]

    @property
    def mixes_experts(self) -> bool:
        """Whether tokens share expert batches, so that a token's K/V depend, by rounding, on later tokens too."""
        return any(getattr(self.hf.config, name, None) for name in ("num_local_experts", "num_experts"))

    def bytes_per_token(self) -> int:
        """Bytes of K and V that one cached token takes."""
        s = self.shape
        return 2 * s["layers"] * s["kv_heads"] * s["d_head"] * torch.finfo(self.dtype).bits // 8

    @cached_property
    def widest_bytes(self) -> int:
        """Bytes of a token's widest moment in a layer: residuals, queries and keys, the MLP's gate, up and product."""
        width, z = self.shape["d_model"], self.shape["heads"] * self.shape["d_head"]
        inner = getattr(self.hf.config, "intermediate_size", None) or 4 * width
        return (4 * width + 2 * max(z, width) + 3 * inner) * torch.finfo(self.dtype).bits // 8


@contextmanager
def _runs(name: str) -> Iterator[None]:
    """Turn what an unknown architecture raises in the bridge or under our masks into one ModelError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as err:
        raise ModelError(f"{name} does not run through the bridge with explicit masks and caches: {err!r}") from err


@dataclass(frozen=True, kw_only=True, eq=False)
class Unproved:
    """A booted model, and plain transformers' logits of the last of `tokens`, taken before the bridge was booted."""

    model: Model
    tokens: list[int]
    reference: Float[Tensor, "vocab"]


def load(name: str, *, device: str, dtype: str) -> Model:
    """Load and prove a model: registry name, planted model, local folder or hub id.

    Raises ModelError for an architecture without per-token K/V, a missing device or a failed self-check;
    WeightsError for files that are missing, tampered with or not safetensors.
    """
    booted = boot(name, device=device, dtype=dtype)
    with _runs(name):
        checks = self_check(booted)
        turns = _turns(booted)
    floor = float(checks[proofs.DECODE].value or 0.0)
    rotation = booted.model.rotation if turns else None
    return replace(booted.model, checks=checks, noise_floor=floor, rotation=rotation)


def boot(name: str, *, device: str, dtype: str) -> Unproved:
    """Verified weights -> plain model -> bridge, without the self-check. Raises as `load` does."""
    place, precision = _device(device), getattr(torch, dtype)
    entry, prepared = resolve(name)
    need = memory.weights_bytes(prepared.folder.glob("*.safetensors"), stored=prepared.precision, dtype=precision)
    if need > memory.available(place):
        raise ModelError(
            f"{name} takes {need / 1e9:.1f} GB as {dtype}, more than is free; use a smaller MODEL= or DTYPE="
        )
    plain, tokenizer = _from_folder(entry, prepared, precision)
    plain = plain.to(device=place).eval()  # never .to(dtype): it would round the rotary frequencies too
    with _runs(name):
        windows, rotation = _windows(plain.config), _rotation(plain)
        tokens = check_tokens(tokenizer, windows)
        with torch.no_grad():
            reference = (
                plain(torch.tensor([tokens], device=place), use_cache=False, logits_to_keep=1).logits[0, -1].float()
            )
        model = Model(
            name=weights.run_name(name),
            twin=rows.twin(plain),
            bridge=_bridge(plain, tokenizer, place),
            hf=plain,
            tokenizer=tokenizer,
            entry=entry,
            prepared=prepared,
            device=place,
            dtype=precision,
            windows=windows,
            rotation=rotation,
        )
    return Unproved(model=model, tokens=tokens, reference=reference)


def files_sha256(folder: Path) -> str:
    """SHA-256 over the names and bytes of everything in a model folder but its weights: config, tokenizer, template."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def resolve(name: str) -> tuple[weights.ModelEntry, weights.Prepared]:
    """The registry entry and the verified local files of a model name."""
    if name in planted.PLANTED:
        cache = weights.cache_folder()
        with disk_errors(cache):
            folder = planted.build(name, cache / "planted" / name)
        entry = weights.entry_for(str(folder))
        return entry, replace(weights.prepare(entry), source="kvnotes.planted, weights set by hand")
    try:
        entry = weights.entry_for(name)
    except UnknownName as err:
        raise UnknownName(kind="model", name=name, known=[*weights.known_models(), *planted.PLANTED]) from err
    return entry, weights.prepare(entry)


def check_tokens(tokenizer: Any, windows: Windows) -> list[int]:
    """Tokens of the self-check: some text, repeated past the narrowest window so that a wrong mask shows."""
    ids = tokenizer(CHECK_TEXT, add_special_tokens=True)["input_ids"]
    length = max(24, min((windows.smallest or 0) + 8, 600))
    return (ids * (length // len(ids) + 1))[:length]


def self_check(booted: Unproved) -> dict[str, Bounded]:
    """Prove the model on a short text; raises ModelError naming the check that failed."""
    model, tokens, reference = booted.model, booted.tokens, booted.reference
    split = len(tokens) - 1
    with torch.no_grad():
        bridged = model.bridge(torch.tensor([tokens], device=model.device), logits_to_keep=1)[0, -1].float()
    full, state = prefill(model, tokens, start=0)
    past = state.crop(split)
    before = past.fingerprint()
    cached = decode(model, [past], tokens[split:], start=split, read=[0])[0, 0]
    edited = past.replace(Cells(positions=None), _noise_like(past))
    moved = decode(model, [edited], tokens[split:], start=split, read=[0])[0, 0]
    errors = {
        proofs.BRIDGE: _size(bridged - reference),
        proofs.MASKS: _size(full - reference),
        proofs.DECODE: _size(cached - full),
    }
    if model.twin is not None:
        errors[proofs.ROW] = _row_error(model, past, tokens)
    reach = {proofs.EDIT: _size(moved - cached), proofs.HOOK: _size(_hooked(model, tokens) - bridged)}
    least = proofs.least_effect(errors)
    checks = {what: Bounded(value=v, bound=model.tolerance, passed=v <= model.tolerance) for what, v in errors.items()}
    checks |= {what: Bounded(value=v, bound=least, passed=v > least) for what, v in reach.items()}
    checks[proofs.STABLE] = _prefix_check(model, tokens, state)
    same = past.fingerprint() == before
    checks[proofs.SAME] = Bounded(value=float(not same), bound=0.0, passed=same)
    for what, check in checks.items():
        if not check.passed:
            raise ModelError(
                f"{model.name} failed its self-check {what!r} ({check.value:.3g}, bound {check.bound:.3g}), so its "
                "numbers would be wrong; check the installed transformers and transformer-lens against constraints.txt"
            )
    return checks


def _prefix_check(model: Model, tokens: list[int], state: KVState) -> Bounded:
    """The first half's cells against those of a forward with another second half: exactly equal, but where tokens
    share expert batches, whose rounding depends on all of them."""
    half = len(tokens) // 2
    _, other = prefill(model, [*tokens[:half], *reversed(tokens[half:])], start=0)
    value, bound = state.deviation(other, start=0, stop=half), model.tolerance if model.mixes_experts else 0.0
    return Bounded(value=value, bound=bound, passed=value <= bound)


def _turns(booted: Unproved) -> bool:
    """Whether the model's keys move by our rotation: some text, shifted, against its prefill at the new positions.

    Layers without RoPE and other pairings of dimensions differ by whole units; what rounding explains is allowed.
    """
    model, text = booted.model, booted.tokens[:24]
    if model.rotation is None:
        return False
    (_, here), (_, there) = (prefill(model, text, start=start) for start in (0, 57))
    moved = here.shift(57, model.rotation)
    size = max(float(layer["k"].abs().max()) for layer in here.layers)
    return moved.deviation(there, start=0, stop=len(text)) <= model.tolerance * max(1.0, size)


def _row_error(model: Model, past: KVState, tokens: list[int]) -> float:
    """A row whose cells are all those of another text, against the decode over a copied cache."""
    query, cells = tokens[past.length :], Cells(positions=None)
    donor = prefill(model, tokens[::-1], start=0)[1].crop(past.length)
    expected = decode(model, [past.replace(cells, donor)], query, start=past.length, read=[len(query) - 1])[0, 0]
    positions = tuple(range(past.length, len(tokens)))
    row = rows.Row(edits=(rows.Edit(cells=cells, donor=donor),))
    group = rows.Group(shared=past, ids=tuple(query), positions=positions, rows=(row,))
    return _size(rows.run(model, [group], vocab=None)[0][0] - expected)


def _size(difference: Tensor) -> float:
    return float(difference.abs().max())


def _noise_like(state: KVState) -> KVState:
    """Seeded noise in the state's shape: an edit that must reach the logits whatever the model reads."""
    noise = torch.Generator().manual_seed(0)
    layers = tuple(
        {name: torch.randn(t.shape, generator=noise).to(t) for name, t in layer.items()} for layer in state.layers
    )
    return KVState(layers, state.positions)


def _hooked(model: Model, tokens: list[int]) -> Float[Tensor, "vocab"]:
    """Last logits with noise added to every head's z by TransformerLens hooks, one a layer, all of which must fire."""
    noise, fired = torch.Generator().manual_seed(0), []

    def add(z: Tensor, hook: Any) -> Tensor:
        fired.append(hook.name)
        return z + torch.randn(z.shape, generator=noise).to(z)

    points = [f"blocks.{layer}.attn.hook_z" for layer in range(model.shape["layers"])]
    with torch.no_grad():
        logits = model.bridge.run_with_hooks(
            torch.tensor([tokens], device=model.device), fwd_hooks=[(point, add) for point in points]
        )
    if len(fired) != len(points):
        raise ModelError(f"{model.name}: {len(fired)} of {len(points)} z hooks fired; its hooks cannot be trusted")
    return logits[0, -1].float()


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"DEVICE={name}: this torch sees no CUDA GPU; use DEVICE=cpu or install a CUDA build of torch")
    return torch.device(name)


def _from_folder(entry: weights.ModelEntry, prepared: weights.Prepared, dtype: torch.dtype) -> tuple[Any, Any]:
    """The plain model and its tokenizer from verified local files: safetensors only, no remote code."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the runner shows what is going on
    try:
        config = AutoConfig.from_pretrained(prepared.folder, trust_remote_code=False, local_files_only=True)
        refuse(entry.name, config)
        plain, loaded = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            prepared.folder,
            config=config,
            dtype=dtype,
            attn_implementation=entry.attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
        tokenizer = weights.load_tokenizer(prepared.folder, converted=entry.gguf is not None)
    except (OSError, ValueError) as err:
        raise ModelError(f"{entry.name} cannot be loaded from {prepared.folder}: {err}") from err
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if wrong := sorted(map(str, loaded[what])):
            raise ModelError(
                f"{entry.name}: config and weights do not belong together, {what.replace('_', ' ')}: "
                f"{', '.join(wrong[:3])}{' and more' if wrong[3:] else ''}; save or download the whole model again"
            )
    if not tokenizer.is_fast:
        raise ModelError(f"{entry.name} has no fast tokenizer, and only those give the offsets that spans need")
    return plain, tokenizer


def refuse(name: str, config: Any) -> None:
    """Raise ModelError for an architecture whose cache is not per-token K and V, by name and with the reason."""
    kind = str(getattr(config, "model_type", "unknown"))
    why = next((reason for prefix, reason in STATEFUL.items() if kind.startswith(prefix)), None)
    layers = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if why is None and getattr(config, "kv_lora_rank", None):
        why = "multi-head latent attention, which caches latents that have no adapter yet"
    if why is None and getattr(config, "is_encoder_decoder", False):
        why = "an encoder-decoder"
    if why is None and (hasattr(config, "vision_config") or hasattr(config, "audio_config")):
        why = "multimodal; load its text model alone"
    if why is None and (kind in ALIBI or getattr(config, "alibi", False)):
        why = "built on ALiBi, whose position bias our explicit masks would leave out"
    if why is None and layers:
        why = f"built of layers without per-token K/V that can be edited ({', '.join(sorted(layers))})"
    if why is not None:
        raise ModelError(f"{name} ({kind}) is {why}: kvnotes edits per-token keys and values and cannot study it")


def _windows(config: Any) -> Windows:
    """Each layer's window from the config: by `layer_types` where there are any, else one for all."""
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [
        "sliding_attention" if width else "full_attention" for _ in range(config.num_hidden_layers)
    ]
    per_layer = tuple(width if kind == "sliding_attention" else None for kind in kinds)
    return Windows(per_layer, by_kind=len(set(per_layer)) > 1)


def _rotation(plain: Any) -> Rotation | None:
    """The model's own inverse frequencies a layer, or None where keys cannot be moved by a fixed turn."""
    rotary, layers = getattr(plain.base_model, "rotary_emb", None), plain.config.num_hidden_layers
    if rotary is None or not hasattr(rotary, "rope_type"):
        return None
    kinds = getattr(plain.config, "layer_types", None) or ["full_attention"] * layers
    types = rotary.rope_type if isinstance(rotary.rope_type, dict) else dict.fromkeys(kinds, rotary.rope_type)
    if not set(types.values()) <= FIXED_ROPE:
        return None
    own = isinstance(rotary.rope_type, dict)  # Gemma-3 keeps one set of frequencies a layer kind
    return Rotation(tuple(getattr(rotary, f"{kind}_inv_freq" if own else "inv_freq") for kind in kinds))


def _bridge(plain: Any, tokenizer: Any, device: torch.device) -> Any:
    """The bridge around `plain`; the weights are shared, its modules are replaced in place."""
    from transformer_lens.model_bridge import TransformerBridge

    if not plain.config.architectures:
        plain.config.architectures = [type(plain).__name__]
    try:
        return TransformerBridge.boot_transformers(
            plain.config.name_or_path, hf_model=plain, tokenizer=tokenizer, dtype=plain.dtype, device=str(device)
        )
    except (ValueError, NotImplementedError) as err:
        raise ModelError(f"TransformerLens has no bridge for {type(plain).__name__}: {err}") from err
