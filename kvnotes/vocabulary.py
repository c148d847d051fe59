"""Token ids -> the text that each stands for, so that a record can be read without its tokenizer. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvnotes import records, weights
from kvnotes.errors import KVNotesError
from kvnotes.records import Instance, Record

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
# what could hide text in a terminal, and that a record refuses: all controls but tab and line ends
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class NoTokenizer(KVNotesError):
    """A record's tokenizer is not on this machine."""


def of(instances: Sequence[Instance], tokenizer: Any) -> dict[str, str]:
    """The text of every token id that occurs in the instances, by the id as a string, in the order of the ids."""
    return pieces(tokenizer, records.token_ids(instances))


def pieces(tokenizer: Any, ids: Iterable[int]) -> dict[str, str]:
    """The text of each token alone. Bytes that are no whole character, and control characters, are U+FFFD."""
    return {str(i): _piece(tokenizer, i) for i in ids}


def _piece(tokenizer: Any, i: int) -> str:
    text = tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # a SentencePiece decoder takes the space that opens its text for the one that it put there itself
    token = tokenizer.convert_ids_to_tokens(i)
    if isinstance(token, str) and token.startswith(SPACE) and not text.startswith(" "):
        text = f" {text}"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def of_record(record: Record) -> dict[str, str]:
    """The vocabulary of a record, by the tokenizer that it was measured with, from the cache; nothing is fetched.

    Raises:
        NoTokenizer: if that tokenizer, by its SHA-256, is not in the cache, or the models extra is not installed.
    """
    name, wanted = record.model.name, record.model.tokenizer_sha256
    for folder in weights.cached_folders(name):
        if wanted is not None and weights.tokenizer_sha256(folder) == wanted:
            try:
                converted = (folder / "manifest.json").exists()
                return of(record.instances, weights.load_tokenizer(folder, converted=converted))
            except ModuleNotFoundError as error:
                raise NoTokenizer(
                    f"token texts: {error.name} is not installed: this needs the models extra, `make setup`"
                ) from error
    raise NoTokenizer(
        f"token texts: the tokenizer of {name} that the record was measured with is not in the cache, so they are "
        f"left out; `make models MODEL={name}` brings that of a registry model"
    )
