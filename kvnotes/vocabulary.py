"""Token ids -> the text that each stands for, so that a record can be read without its tokenizer. No torch."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from kvnotes import records, weights
from kvnotes.errors import KVNotesError
from kvnotes.records import Instance, Record

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
LOST = "\N{REPLACEMENT CHARACTER}"  # in the place of what no token can show
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
    return _CONTROL.sub(LOST, text)


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


def spell(texts: Sequence[str], prompt: str) -> bool | None:
    """Whether the texts of a prompt's tokens, one after the other, are its text; the first may stand before it, as a
    special token that the tokenizer adds does. None where only white space, letter case or the form of characters
    differ, which some tokenizers change."""
    if any(_pattern(texts[skipped:]).fullmatch(prompt) for skipped in (0, 1)):
        return True
    plain, bare = [_bare(text) for text in texts], _bare(prompt)
    return None if any(_pattern(plain[skipped:]).fullmatch(bare) for skipped in (0, 1)) else False


def begins(text: str, word: str) -> bool:
    """Whether a token's text can be the beginning of a word."""
    return _pattern([_bare(text)]).match(_bare(word)) is not None


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """What the joined texts match: a run of U+FFFD stands for a character or more that no token holds whole."""
    parts = re.split(f"{LOST}+", "".join(texts))
    return re.compile("[^\\t\\n\\r -~]+".join(map(re.escape, parts)))


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
