"""Pair -> tokens with spans, or the reason it cannot be used. No torch.

A token belongs to the piece that holds its first visible character, found by offsets; the changed span is every
token that overlaps a changed piece. The arms must then agree on every other token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvnotes.errors import KVNotesError
from kvnotes.instance import Arm, Pair, Piece, Skipped, Slot, TokenPair

MARK = "\x02kvnotes-user-turn\x03"  # stands for the user's turn while the template around it is read off


class PromptError(KVNotesError):
    """A chat template that cannot be used with known offsets."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """What stands before and after the user's turn, with the assistant's turn opened."""

    before: str
    after: str
    bos: int | None  # the BOS that the model wants exactly once, None where it wants none
    first: tuple[int, ...]  # what must be put first by hand: that BOS, where the template's text has none


def read_template(tokenizer: Any, *, use: bool | None, options: Mapping[str, Any]) -> Template:
    """The chat template around a user's turn, or nothing at all for a base model; `use` of None means "if any".

    Raises PromptError where the model should have a template and has none, or where it changes its message.
    """
    bos = tokenizer.bos_token_id if _wants_bos(tokenizer) else None
    if use is False or (use is None and not tokenizer.chat_template):
        return Template(before="", after="", bos=bos, first=() if bos is None else (bos,))
    if not tokenizer.chat_template:
        raise PromptError(
            "the model's config asks for a chat template, but the tokenizer has none; set chat.use: false"
        )
    from jinja2 import TemplateError

    message = [{"role": "user", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **options)
    except TemplateError as err:
        raise PromptError(f"the chat template refuses a user's turn alone: {err}; set chat.use: false") from err
    if text.count(MARK) != 1:
        raise PromptError("the chat template does not hold its message exactly once, so spans cannot be known")
    before, after = text.split(MARK)
    if "<think>" in after and "</think>" not in after:
        raise PromptError("the chat template opens a thinking block, so the answer prefix would stand inside it")
    first = () if bos is None or before.startswith(tokenizer.bos_token) else (bos,)
    return Template(before=before, after=after, bos=bos, first=first)


def tokenise(pair: Pair, *, tokenizer: Any, template: Template, query: int) -> TokenPair | Skipped:
    """Both arms as tokens, with the last `query` tokens as the query block; Skipped says why where unusable."""
    try:
        base, target = (_encode(arm, tokenizer=tokenizer, template=template) for arm in (pair.base, pair.target))
        changed = _changed(pair, base, target)
        actions = [_first_token(arm, tokenizer=tokenizer, template=template) for arm in (pair.base, pair.target)]
        if actions[0] == actions[1]:
            raise _Unfit("both actions start with the same token", f"token id {actions[0]}")
        if changed[-1] >= len(base.ids) - query:
            raise _Unfit("the changed span reaches into the query block", f"query of {query} tokens")
        if len(base.ids) - query - changed[0] == len(changed):
            raise _Unfit("no token between the changed span and the query block", f"query of {query} tokens")
    except _Unfit as unfit:
        return Skipped(pair=pair, reason=unfit.reason, detail=unfit.detail)
    return TokenPair(
        pair=pair,
        base_ids=base.ids,
        target_ids=target.ids,
        slots=base.slots,
        changed=changed,
        query=tuple(range(len(base.ids) - query, len(base.ids))),
        base_action=actions[0],
        target_action=actions[1],
    )


@dataclass(frozen=True)
class _Encoded:
    ids: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]  # pieces that each token overlaps
    slots: tuple[Slot, ...]


class _Unfit(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def _wants_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def _pieces(arm: Arm, template: Template) -> list[Piece]:
    """The whole prompt as pieces, template included."""
    return [
        Piece(text=template.before, role="template", key="before"),
        *arm.user,
        Piece(text=template.after, role="template", key="after"),
        *arm.answer,
    ]


def _encode(arm: Arm, *, tokenizer: Any, template: Template) -> _Encoded:
    pieces = _pieces(arm, template)
    text = "".join(piece.text for piece in pieces)
    ids, offsets = _tokens(text, tokenizer=tokenizer, template=template)
    _check_special(ids, tokenizer, template)
    starts = [0, *accumulate(len(piece.text) for piece in pieces)]
    owners = tuple(_overlapped(span, starts) for span in offsets)
    seen: Counter[str] = Counter()
    slots = []
    for span, pieces_of in zip(offsets, owners, strict=True):
        name = pieces[_owner(text, span, starts)].span if pieces_of else "template.before"
        slots.append(Slot(span=name, index=seen[name]))
        seen[name] += 1
    return _Encoded(ids, owners, tuple(slots))


def _tokens(text: str, *, tokenizer: Any, template: Template) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Ids and character offsets; the BOS is put by hand, since add_special_tokens may add an end token too."""
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return (*template.first, *out["input_ids"]), [*((0, 0) for _ in template.first), *out["offset_mapping"]]


def _check_special(ids: tuple[int, ...], tokenizer: Any, template: Template) -> None:
    # a model that wants no BOS may still use that id in its template
    if template.bos is not None and ids.count(template.bos) != 1:
        raise _Unfit("not exactly one BOS", f"{ids.count(template.bos)} of them")
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown not in (template.bos, tokenizer.eos_token_id) and unknown in ids:
        raise _Unfit("a word unknown to the tokenizer", f"token {ids.index(unknown)}")


def _overlapped(span: tuple[int, int], starts: list[int]) -> tuple[int, ...]:
    """Indices of the pieces that the characters span[0]..span[1]-1 touch; none for an added special token."""
    first, last = bisect_right(starts, span[0]) - 1, bisect_right(starts, max(span[1] - 1, span[0])) - 1
    return tuple(i for i in range(first, last + 1) if starts[i] < span[1] and starts[i + 1] > span[0])


def _owner(text: str, span: tuple[int, int], starts: list[int]) -> int:
    """The piece of the token's first visible character; of its first character where none is visible."""
    visible = next((i for i in range(*span) if not text[i].isspace()), span[0])
    return bisect_right(starts, visible) - 1


def _changed(pair: Pair, base: _Encoded, target: _Encoded) -> tuple[int, ...]:
    if len(base.ids) != len(target.ids):
        raise _Unfit("arms of unequal token count", f"{len(base.ids)} and {len(target.ids)}")
    pieces = {i + 1 for i in pair.changed}  # piece 0 is the template's beginning
    spans = [{i for i, owned in enumerate(arm.owners) if pieces & set(owned)} for arm in (base, target)]
    if spans[0] != spans[1]:
        raise _Unfit("the changed span covers different tokens in the arms", f"{sorted(spans[0] ^ spans[1])}")
    differ = {i for i, (a, b) in enumerate(zip(base.ids, target.ids, strict=True)) if a != b}
    if differ - spans[0]:
        raise _Unfit("tokens outside the changed span differ", f"positions {sorted(differ - spans[0])}")
    if not differ:
        raise _Unfit("both arms have the same tokens", pair.id)
    return tuple(sorted(spans[0]))


def _first_token(arm: Arm, *, tokenizer: Any, template: Template) -> int:
    text = "".join(piece.text for piece in _pieces(arm, template))
    prompt, _ = _tokens(text, tokenizer=tokenizer, template=template)
    full, _ = _tokens(text + arm.action, tokenizer=tokenizer, template=template)
    if full[: len(prompt)] != prompt or len(full) == len(prompt):
        raise _Unfit("the answer prefix merges with the action", arm.action)
    return full[len(prompt)]
