"""A second, slow and short reading of a GGUF's tokenizer, to hold the converted one against.

It shares no code with kvnotes: it parses the file's key-value section itself, splits with the `regex` module
and merges by looking for the best pair again after every merge. The steps are llama.cpp's, special tokens
parsed.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import regex

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL, USER_DEFINED = 3, 4
SPLITS = {
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"],
}


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of a GGUF file (version 3, little-endian)."""
    with path.open("rb") as stream:
        magic, version, _tensors, pairs = struct.unpack("<4sIQQ", stream.read(24))
        assert (magic, version) == (b"GGUF", 3)
        return {_string(stream): _value(stream, *struct.unpack("<I", stream.read(4))) for _ in range(pairs)}


def _string(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    return stream.read(length).decode("utf-8")


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(stream)
    if kind == ARRAY:
        inner, count = struct.unpack("<IQ", stream.read(12))
        return [_value(stream, inner) for _ in range(count)]
    layout = "<" + SCALARS[kind]
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class ReferenceTokenizer:
    """Text -> token ids and back, straight from the GGUF's tokens, types, merges and scores."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        self.types: list[int] = metadata["tokenizer.ggml.token_type"]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        special = [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        longest_first = sorted(special, key=len, reverse=True)
        self.special = regex.compile("|".join(map(regex.escape, longest_first)))
        self.is_byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
        if self.is_byte_level:
            self.patterns = [regex.compile(p) for p in SPLITS[metadata["tokenizer.ggml.pre"]]]
            self.ranks = {tuple(m.split(" ")): r for r, m in enumerate(metadata["tokenizer.ggml.merges"])}
            self.alphabet = byte_alphabet()
        else:
            self.scores: list[float] = metadata["tokenizer.ggml.scores"]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS; special tokens written in it become their ids."""
        ids: list[int] = []
        start = 0
        for match in self.special.finditer(text):
            ids += self._plain(text[start : match.start()])
            ids.append(self.ids[match.group()])
            start = match.end()
        return ids + self._plain(text[start:])

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, special tokens included."""
        return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

    def _bytes(self, index: int) -> bytes:
        token = self.tokens[index]
        if self.types[index] in (CONTROL, USER_DEFINED):
            return token.encode()
        if self.is_byte_level:
            back = {char: byte for byte, char in self.alphabet.items()}
            return bytes(back[char] for char in token)
        if regex.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def _plain(self, text: str) -> list[int]:
        return self._byte_level(text) if self.is_byte_level else self._sentencepiece(text.replace(" ", "▁"))

    def _byte_level(self, text: str) -> list[int]:
        pieces = [text]
        for pattern in self.patterns:
            pieces = [part for piece in pieces for part in _isolate(pattern, piece)]
        ids: list[int] = []
        for piece in pieces:
            symbols = [self.alphabet[byte] for byte in piece.encode()]
            merged = _merge(symbols, lambda left, right: self.ranks.get((left, right)))
            # A byte that the vocabulary does not have is dropped (SmolLM2 lacks some control characters).
            ids += [self.ids[symbol] for symbol in merged if symbol in self.ids]
        return ids

    def _sentencepiece(self, text: str) -> list[int]:
        def rank(left: str, right: str) -> float | None:
            index = self.ids.get(left + right)
            return None if index is None else -self.scores[index]

        ids: list[int] = []
        for symbol in _merge(list(text), rank):
            if symbol in self.ids:
                ids.append(self.ids[symbol])
            else:
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids


def _isolate(pattern: regex.Pattern[str], text: str) -> list[str]:
    """The matches and what lies between them, in order, nothing lost."""
    parts: list[str] = []
    start = 0
    for match in pattern.finditer(text):
        parts += [text[start : match.start()], match.group()]
        start = match.end()
    return [part for part in [*parts, text[start:]] if part]


def _merge(symbols: list[str], rank: Any) -> list[str]:
    """Merge the best-ranked pair, the leftmost of equals, until no pair can be merged."""
    while True:
        ranked = [(rank(*pair), at) for at, pair in enumerate(pairwise(symbols))]
        possible = [(r, at) for r, at in ranked if r is not None]
        if not possible:
            return symbols
        _, at = min(possible)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
