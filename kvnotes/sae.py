"""A sparse autoencoder (SAE) of one layer's residuals: trained here and found again, or loaded from a sae-lens folder.

Training is sae-lens' own `SAETrainer` on a `TopKTrainingSAE` (Gao et al. 2024), fed with residuals that this suite's
loader has made: sae-lens has none for the models as they are loaded here. A first token and one of massive norm are
left out of the training: a handful of them has nearly all the variance, and a dictionary that rebuilds them alone has a
fraction of variance unexplained (FVU) near 0. The FVU is therefore given without them, and with them beside it.

Clamping features moves an activation along their decoder rows by the change of their activations. What the SAE does not
rebuild stays as it is, so that a clamp of no feature is an exact no-op.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes import activations, features, models, records
from kvnotes.activations import Residuals, Text
from kvnotes.cache import CacheError
from kvnotes.errors import KVNotesError
from kvnotes.instance import TokenPair
from kvnotes.residuals import residuals

RECIPE = 1  # counts what changes a trained dictionary beside its settings
WEIGHTS, SETTINGS, QUALITY = "sae_weights.safetensors", "cfg.json", "quality.json"
DEAD_AFTER = 0.25  # of an epoch without firing, from which on a feature is revived by the auxiliary loss
WARM_UP, DECAY = 0.05, 0.3  # of the training's steps
CHUNK = 4096  # tokens encoded at once
LINEAR = 1e-4  # largest error of decoding as a sum of decoder rows, relative to the activations
HOOK = re.compile(r"^blocks\.(\d+)\.hook_resid_(pre|post)$")


class SAEError(KVNotesError):
    """A folder that is no usable SAE of this model."""


# --- a dictionary and its use -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    """An SAE of the residual after a layer, and its decoder's rows as they are added to it."""

    sae: Any
    layer: int
    decoder: Float[Tensor, "feature d_model"]
    sha256: str  # of weights and settings

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch feature"]:
        """Every feature's activation, in float32."""
        return self.sae.encode(x.float().to(self.decoder.device))

    @torch.no_grad()
    def rebuilt(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """What the SAE makes of activations."""
        return self.sae.decode(self.encode(x))


@dataclass(frozen=True, kw_only=True, eq=False)
class Clamp:
    """Chosen features of a dictionary at given values, all else, the reconstruction error included, the run's own: a
    mix for an activation patch without a donor."""

    dictionary: Dictionary
    chosen: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, own: Float[Tensor, "width"], donor: Float[Tensor, "width"] | None) -> Float[Tensor, "width"]:
        """`own`, moved along the decoder rows. Raises CacheError with a donor, which it has no use for."""
        if donor is not None:
            raise CacheError("a clamp has values of its own: give the patch no donor")
        if not self.chosen:
            return own
        rows = list(self.chosen)
        change = torch.tensor(self.values, device=own.device) - self.dictionary.encode(own)[rows]
        return own + (change @ self.dictionary.decoder[rows]).to(own)


def clamp(dictionary: Dictionary, chosen: Sequence[int], means: Mapping[str, Sequence[float]], label: bool) -> Clamp:
    """Chosen features at their mean over prompts with the label, or over those without; `means` has both by feature."""
    return Clamp(
        dictionary=dictionary, chosen=tuple(chosen), values=tuple(means[str(feature)][int(label)] for feature in chosen)
    )


def ablated(dictionary: Dictionary, chosen: Sequence[int]) -> Clamp:
    """Chosen features at 0."""
    return Clamp(dictionary=dictionary, chosen=tuple(chosen), values=(0.0,) * len(chosen))


def read(
    model: Any, pair: TokenPair, places: Mapping[str, Mapping[str, int]], dictionary: Dictionary
) -> dict[str, Any]:
    """Active features of both arms by what `places` names (a kind of site, a fold), as `features.active` has them."""
    wanted = sorted({p for by in places.values() for p in by.values()})
    if not wanted:
        return {}
    codes = dictionary.encode(residuals(model, pair, wanted)[:, dictionary.layer]).cpu().numpy()
    return {
        kind: {
            name: {arm: features.active(codes[at, wanted.index(p)]) for at, arm in enumerate(features.ARMS)}
            for name, p in by.items()
        }
        for kind, by in places.items()
    }


# --- loading ----------------------------------------------------------------------------------------------


def load(folder: Path, model: Any, *, layer: int | None = None) -> Dictionary:
    """An SAE from a folder as sae-lens saves it: its settings (cfg.json) and safetensors, nothing else. A pickle is not
    read. `layer` is where its activations are taken (the residual after it) where the settings do not say.

    Raises SAEError for another folder, another width, an unknown place, or a decoder that is no sum of rows.
    """
    missing = [name for name in (SETTINGS, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise SAEError(f"{folder} has no {' and no '.join(missing)}: name a folder that sae-lens saved, as safetensors")
    from sae_lens import SAE

    try:
        sae = SAE.load_from_disk(folder, device=str(model.device), dtype="float32").eval().requires_grad_(False)
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as err:
        raise SAEError(f"{folder} is no SAE that sae-lens can load: {err}") from err
    except Exception as err:  # safetensors' own error has no public base
        raise SAEError(f"{folder}/{WEIGHTS} is not a safetensors file: {err}") from err
    at = _place(folder, sae.cfg.metadata.hook_name, layer)
    if not 0 <= at < model.shape["layers"]:
        raise SAEError(f"{folder} is of layer {at}, and {model.name} has {model.shape['layers']}")
    if sae.cfg.d_in != model.shape["d_model"]:
        raise SAEError(f"{folder} is of width {sae.cfg.d_in}, {model.name} of {model.shape['d_model']}")
    return Dictionary(sae=sae, layer=at, decoder=_decoder(folder, sae), sha256=sha256(folder))


def sha256(folder: Path) -> str:
    """Of an SAE's settings and weights."""
    return hashlib.sha256((folder / SETTINGS).read_bytes() + (folder / WEIGHTS).read_bytes()).hexdigest()


def _place(folder: Path, hook: str | None, layer: int | None) -> int:
    """The layer after which the residual is meant: what goes into a layer is what the one before gives."""
    found = HOOK.match(hook or "")
    if found is None:
        if hook is not None or layer is None:
            raise SAEError(f"{folder} is of {hook or 'an unnamed place'}; a residual is wanted (or name its --layer)")
        return layer
    at = int(found[1]) - (found[2] == "pre")
    if layer not in (None, at):
        raise SAEError(f"{folder} is of {hook}, not of the residual after layer {layer}: leave --layer out")
    return at


@torch.no_grad()
def _decoder(folder: Path, sae: Any) -> Float[Tensor, "feature d_model"]:
    """What a feature of activation 1 adds to the residual, one a row; proved on random activations."""
    rows = sae.W_dec.detach()
    if getattr(sae.cfg, "rescale_acts_by_decoder_norm", False):
        rows = rows / rows.norm(dim=1, keepdim=True)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, sae.cfg.d_in, generator=draw).to(rows) * 10
    acts = sae.encode(x)
    error = float((sae.decode(acts) - acts @ rows - sae.b_dec).abs().max())
    if not error <= LINEAR * max(1.0, float(acts.abs().max())):
        raise SAEError(f"{folder}: its decoder is not a sum of feature rows (off by {error:.2g}), as clamping needs it")
    return rows


# --- quality ----------------------------------------------------------------------------------------------


def fvu(x: Float[Tensor, "token d_model"], rebuilt: Float[Tensor, "token d_model"]) -> float:
    """Fraction of variance unexplained: squared error over squared distance from the mean, both summed over tokens."""
    wide = x.double()
    return float((wide - rebuilt.double()).pow(2).sum() / (wide - wide.mean(dim=0)).pow(2).sum())


def frequencies(
    dictionary: Dictionary, x: Float[Tensor, "token d_model"], chosen: Int[Tensor, "chosen"]
) -> Float[Tensor, "feature"]:
    """In what share of the chosen tokens each feature is active."""
    counts = torch.zeros(len(dictionary.decoder))
    for some in chosen.split(CHUNK):
        counts += (dictionary.encode(x[some]) != 0).sum(dim=0).cpu()
    return counts / len(chosen)


def quality(dictionary: Dictionary, of: Residuals) -> dict[str, float | int | None]:
    """Held-out FVU: of usual tokens, with massive-norm tokens, with first tokens too; of prompts alone and of the
    corpus alone. None where there are no such tokens. `dead`: share of the features that are active in none of the
    `usual tokens`, held-out or not."""
    held, usual, sinks = of.held_out, of.usual, activations.massive(of.values.norm(dim=1))
    x = of.values[held]
    rebuilt = torch.cat([dictionary.rebuilt(x[low : low + CHUNK]).cpu() for low in range(0, len(x), CHUNK)])

    def over(tokens: Tensor) -> float | None:
        picked = tokens[held]
        return fvu(x[picked], rebuilt[picked]) if int(picked.sum()) > 1 else None

    active = frequencies(dictionary, of.values, usual.nonzero()[:, 0])
    return {
        "fvu": over(usual),
        "fvu with massive tokens": over(usual | (sinks & ~of.first)),
        "fvu with first and massive tokens": over(torch.ones_like(held)),
        "fvu of prompts": over(usual & of.prompt),
        "fvu of the corpus": over(usual & ~of.prompt),
        "dead": float((active == 0).float().mean()),
        "active features a token": float(active.sum()),
        "held-out tokens": int(held.sum()),
        "massive tokens": int(sinks.sum()),
        "first tokens": int(of.first.sum()),
        "massive first tokens": int((sinks & of.first).sum()),
        "usual tokens": int(usual.sum()),
        "tokens": len(of.values),
    }


# --- training ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a dictionary is trained: its size as a multiple of d_model, features active a token, tokens of text and their
    share of prompts, tokens in a piece of corpus, passes over them, tokens in a step, Adam's rate."""

    expansion: int
    active: int
    tokens: int
    prompts: float
    context: int
    epochs: int
    batch: int
    rate: float
    seed: int
    task: str


def obtain(
    model: Any, recipe: Recipe, *, given: Path | None, corpus: Path | None, layer: int | None, home: Path
) -> tuple[Dictionary, dict[str, Any]]:
    """The dictionary and its provenance: the given one, the one that was trained before on the same text with the same
    recipe, or a new one, kept in a folder of its own under `home`.

    A given one is judged on the held-out text.
    """
    found = activations.texts(
        model,
        task=recipe.task,
        corpus=corpus,
        seed=recipe.seed,
        tokens=recipe.tokens,
        share=recipe.prompts,
        context=recipe.context,
    )
    text = {
        "corpus": activations.corpus_name(corpus) if recipe.prompts < 1 else None,
        "scenarios": sorted({one.source for one in found if one.kind == "prompt"}),
        "sha256": activations.fingerprint(found),
    }
    if given is not None:
        dictionary = load(given, model, layer=layer)
        of = activations.residuals(model, [one for one in found if one.held_out], layer=dictionary.layer)
        return dictionary, {**_described(dictionary), "trained here": False, "text": text, **quality(dictionary, of)}
    if layer is None:
        raise SAEError("no layer was chosen to train on: name one with --layer")
    key = {  # all that a dictionary is made of: another of any of these is another dictionary
        "recipe": {**vars(recipe), "version": RECIPE},
        "layer": layer,
        "text": text,
        "weights": model.prepared.weights_sha256,
        "files": models.files_sha256(model.prepared.folder),
        "dtype": str(model.dtype),
        "sae-lens": metadata.version("sae-lens"),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    folder = home / f"dictionary-{name}"
    if not (folder / QUALITY).is_file():
        _train_into(folder, model, recipe, found, layer=layer)
    dictionary = load(folder, model)
    kept = json.loads((folder / QUALITY).read_text(encoding="utf-8"))
    return dictionary, {**_described(dictionary), "trained here": True, "folder": folder.name, **key, **kept}


def _described(dictionary: Dictionary) -> dict[str, Any]:
    cfg = dictionary.sae.cfg
    return {
        "sha256": dictionary.sha256,
        "architecture": cfg.architecture(),
        "features": cfg.d_sae,
        "k": getattr(cfg, "k", None),
        "layer": dictionary.layer,
        "sae-lens": metadata.version("sae-lens"),
        "massive": f"norm above {activations.MASSIVE:g} x the median",
        "reserved scenarios": features.RULE,
    }


def _train_into(folder: Path, model: Any, recipe: Recipe, found: Sequence[Text], *, layer: int) -> None:
    """Train, and put the whole folder in place in one step. It keeps itself out of git: it can be made again."""
    started = time.perf_counter()
    of = activations.residuals(model, found, layer=layer)
    collected = time.perf_counter()
    chosen = (of.usual & ~of.held_out).nonzero()[:, 0]
    sae = train(of.values, chosen, recipe, device=str(model.device))
    trained = time.perf_counter()
    sae.cfg.metadata.model_name = model.name
    sae.cfg.metadata.hook_name = f"blocks.{layer}.hook_resid_post"
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        sae.save_inference_model(unfinished)
        made = {
            **quality(load(unfinished, model), of),
            "trained on": len(chosen),
            "seconds collecting": round(collected - started, 1),
            "seconds training": round(trained - collected, 1),
        }
        records.write_atomically(json.dumps(made, indent=1).encode(), unfinished / QUALITY)
        records.write_atomically(b"*\n", unfinished / ".gitignore")
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def train(x: Float[Tensor, "token d_model"], chosen: Int[Tensor, "chosen"], recipe: Recipe, *, device: str) -> Any:
    """A sae-lens TopK training SAE fitted to the chosen tokens, which are not copied. Inputs are scaled to a mean norm
    of sqrt(d_model), and sae-lens folds that into the weights; the decoder's bias starts at the tokens' mean."""
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    width, batch = x.shape[1], min(recipe.batch, len(chosen))
    steps = max(1, recipe.epochs * len(chosen) // batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        sae = TopKTrainingSAE(
            TopKTrainingSAEConfig(
                d_in=width,
                d_sae=recipe.expansion * width,
                k=recipe.active,
                device=device,
                normalize_activations="expected_average_only_in",
            )
        )
        config = SAETrainerConfig(
            total_training_samples=steps * batch,
            train_batch_size_samples=batch,
            lr=recipe.rate,
            lr_end=recipe.rate,
            lr_warm_up_steps=max(1, round(WARM_UP * steps)),
            lr_decay_steps=round(DECAY * steps),
            dead_feature_window=max(1, round(DEAD_AFTER * len(chosen) / batch)),
            device=device,
            logger=LoggingConfig(log_to_wandb=False),
        )
        trainer = SAETrainer(config, sae, batches(x, chosen, batch=batch, seed=recipe.seed))
        scale = width**0.5 / float(x.norm(dim=1)[chosen].mean())
        trainer.activation_scaler.scaling_factor = scale
        middle = torch.stack([x[some].sum(dim=0) for some in chosen.split(CHUNK)]).sum(dim=0) / len(chosen)
        sae.b_dec.data = (middle * scale).to(sae.b_dec)
        return trainer.fit()


def batches(
    x: Float[Tensor, "token d_model"], chosen: Int[Tensor, "chosen"], *, batch: int, seed: int
) -> Iterator[Float[Tensor, "batch d_model"]]:
    """The provider that sae-lens trains from: the chosen tokens in a new random order each time round, without end."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        order = chosen[torch.randperm(len(chosen), generator=draw)]
        for low in range(0, len(order) - batch + 1, batch):
            yield x[order[low : low + batch]]
