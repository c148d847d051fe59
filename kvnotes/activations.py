"""Diverse text and its residuals at one layer: what a sparse autoencoder is trained on.

Two kinds of text: the task's own prompts, in every layout, of the scenarios that a rule holds back from evaluation
(`features.reserved`), and pieces of the files of a folder, by default the Python standard library's sources.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import random
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvnotes import discover, prompts
from kvnotes.errors import KVNotesError
from kvnotes.features import reserved
from kvnotes.forward import forward
from kvnotes.instance import TokenPair
from kvnotes.interventions import Point
from kvnotes.points import tree_of, visited

MASSIVE = 10.0  # times the median norm; attention sinks have 20 to 1,000 times, other tokens seldom 3 times
ROUND = 72  # pairs a layout, kind and seed
PIECES = 4  # of one file, before the next file has its turn
LONGEST_FILE = 2**20  # characters that are read of one
BATCH = 1024  # tokens in a forward
HELD_OUT = 10  # one source in ten is held out


class TextError(KVNotesError):
    """Text that cannot be used: none, too little, or nothing that the tokenizer knows."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Token ids, run on their own from position 0. `source` is the scenario or the file they come from, `held_out`
    whether that is kept from training."""

    ids: tuple[int, ...]
    kind: Literal["prompt", "corpus"]
    source: str
    held_out: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Residuals:
    """The residuals of every token of some texts. `first`: the first token of its text, a BOS where the model has one;
    `prompt`: of a prompt; `held_out`: of a text that is kept from training."""

    values: Float[Tensor, "token d_model"]
    first: Bool[Tensor, "token"]
    prompt: Bool[Tensor, "token"]
    held_out: Bool[Tensor, "token"]

    @property
    def usual(self) -> Bool[Tensor, "token"]:
        """Tokens that are neither a text's first nor of massive norm."""
        return ~self.first & ~massive(self.values.norm(dim=1))


def massive(norms: Float[Tensor, "token"]) -> Bool[Tensor, "token"]:
    """Which tokens are of massive norm (Sun et al. 2024, "Massive activations"): above ten times the median of all."""
    return norms > MASSIVE * norms.median()


# --- text -------------------------------------------------------------------------------------------------


def texts(
    model: Any, *, task: str, corpus: Path | None, seed: int, tokens: int, share: float, context: int
) -> list[Text]:
    """About `tokens` tokens: `share` of them of prompts, the others of pieces of `context` tokens of a folder's files.

    Raises TextError where there is not enough.
    """
    found: list[Text] = []
    for wanted, made in (
        (round(tokens * share), prompt_texts(model, task, seed=seed)),
        (tokens - round(tokens * share), corpus_texts(model, corpus or library(), seed=seed, context=context)),
    ):
        count = 0
        while count < wanted and (text := next(made, None)) is not None:
            found.append(text)
            count += len(text.ids)
        if count < wanted:
            raise TextError(
                f"only {count:,} of {wanted:,} tokens of text are there; ask for fewer with --tokens, for another "
                "share of prompts with --prompts, or name a larger folder with --corpus"
            )
    kept = {kind: _kept({one.source for one in found if one.kind == kind}) for kind in ("prompt", "corpus")}
    return [replace(one, held_out=one.source in kept[one.kind]) for one in found]


def _kept(sources: Collection[str]) -> set[str]:
    """The sources that are held out: a tenth, at least one, by the hashes of their names."""
    order = sorted(sources, key=lambda name: hashlib.sha256(f"held out {name}".encode()).hexdigest())
    return set(order[: max(1, len(order) // HELD_OUT)])


def fingerprint(found: Sequence[Text]) -> str:
    """SHA-256 of the texts' token ids, in their order."""
    digest = hashlib.sha256()
    for text in found:
        digest.update(f"{text.kind} {text.source} {text.ids}\n".encode())
    return digest.hexdigest()


def prompt_texts(model: Any, task: str, *, seed: int) -> Iterator[Text]:
    """Both arms of pairs of every layout and kind, of the reserved scenarios, each prompt once, in a random order."""
    module, seen = discover.task(task), set()
    for more in itertools.count():
        kinds = itertools.product(module.LAYOUTS, ("field", "polarity"))
        pairs = [
            pair
            for layout, kind in kinds
            for pair in module.generate(layout=layout, pair=kind, n=ROUND, seed=seed + more)
            if reserved(pair.scenario)
        ]
        tokenised = [prompts.tokenise(p, tokenizer=model.tokenizer, template=model.template, query=1) for p in pairs]
        usable = [pair for pair in tokenised if isinstance(pair, TokenPair)]
        made = {ids: pair.pair.scenario for pair in usable for ids in (pair.base_ids, pair.target_ids)}
        fresh = [(ids, scenario) for ids, scenario in made.items() if ids not in seen]
        if not fresh:
            return
        random.Random(f"prompts {seed} {more}").shuffle(fresh)
        seen |= set(made)
        yield from (Text(ids=ids, kind="prompt", source=scenario) for ids, scenario in fresh)


def library() -> Path:
    """The folder of the Python standard library's sources."""
    return Path(sysconfig.get_path("stdlib"))


def corpus_name(corpus: Path | None) -> str:
    """What a record calls the folder: no path of this machine."""
    return f"standard library of Python {platform.python_version()}" if corpus is None else corpus.name


def corpus_texts(model: Any, folder: Path, *, seed: int, context: int) -> Iterator[Text]:
    """Pieces of `context` tokens of the folder's text files, a few of each file in turn. Installed packages and tests
    of the standard library are left out. Raises TextError for a folder without text that the tokenizer knows."""
    first, unknown, some = model.template.bos, model.tokenizer.unk_token_id, False
    room, later = context - (first is not None), []
    for name, ids in _files(model, folder, seed):
        pieces = [ids[at : at + room] for at in range(0, len(ids) - room + 1, room)]
        known = [piece for piece in pieces if unknown is None or piece.count(unknown) * 10 < room]
        random.Random(f"pieces {seed} {name}").shuffle(known)
        yield from _named(name, known[:PIECES], first)
        later.append((name, known[PIECES:]))
        some = some or bool(known)
    if not some:
        raise TextError(
            f"{folder} holds no text of {context} tokens that this model's tokenizer knows: name another with --corpus "
            "or use prompts alone with --prompts 1"
        )
    for low in range(0, max(len(pieces) for _, pieces in later), PIECES):
        for name, pieces in later:
            yield from _named(name, pieces[low : low + PIECES], first)


def _named(name: str, pieces: Sequence[Sequence[int]], first: int | None) -> Iterator[Text]:
    for piece in pieces:
        yield Text(ids=(*([] if first is None else [first]), *piece), kind="corpus", source=name)


def _files(model: Any, folder: Path, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Each text file's name within the folder and its token ids, in a random order."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    paths = sorted(path for path in folder.rglob("*.py" if folder == library() else "*") if path.is_file())
    random.Random(f"files {seed}").shuffle(paths)
    for path in paths:
        within = path.relative_to(folder)
        if skipped & set(within.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")[:LONGEST_FILE]
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and "\0" not in text:
            yield within.as_posix(), model.tokenizer(text, add_special_tokens=False)["input_ids"]


# --- residuals --------------------------------------------------------------------------------------------


class _Reached(Exception):
    """The chosen layer has run; the layers above need not."""


@torch.no_grad()
def residuals(model: Any, found: Sequence[Text], *, layer: int) -> Residuals:
    """The residuals of every token of the texts after one layer; the layers above it are not run.

    Texts of one length are run side by side. Raises CacheError for a model whose layers cannot be seen.
    """
    values = torch.empty(sum(len(text.ids) for text in found), model.shape["d_model"])
    starts = [0, *itertools.accumulate(len(text.ids) for text in found)]
    by_length: dict[int, list[int]] = {}
    for at, text in enumerate(found):
        by_length.setdefault(len(text.ids), []).append(at)
    for length, members in by_length.items():
        size = max(1, BATCH // length)
        for low in range(0, len(members), size):
            batch = members[low : low + size]
            rows = _seen(model, torch.tensor([found[at].ids for at in batch]), layer=layer)
            for at, row in zip(batch, rows, strict=True):
                values[starts[at] : starts[at] + length] = row
    lengths = torch.tensor([len(text.ids) for text in found])
    first = torch.zeros(len(values), dtype=torch.bool)
    first[torch.tensor(starts[:-1])] = True
    prompt, held_out = (
        torch.tensor([getter(text) for text in found]).repeat_interleave(lengths)
        for getter in (lambda text: text.kind == "prompt", lambda text: text.held_out)
    )
    return Residuals(values=values, first=first, prompt=prompt, held_out=held_out)


def _seen(model: Any, ids: Tensor, *, layer: int) -> Float[Tensor, "row pos d_model"]:
    """The residuals after the layer, of one forward, which stops there."""
    kept: list[Tensor] = []

    def keep(_: Point, at: int, tensor: Tensor) -> Tensor:
        if at == layer:
            kept.append(tensor.float().cpu())
            raise _Reached
        return tensor

    try:
        with visited(tree_of(model), keep, ("resid_post",)):
            forward(
                model,
                ids,
                positions=torch.arange(ids.shape[1]),
                past=None,
                over=None,
                read=[ids.shape[1] - 1],
                keep=False,
            )
    except _Reached:
        pass
    return kept[0]
