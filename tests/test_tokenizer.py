from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from kvnotes.gguf_source import Metadata, build_tokenizer
from kvnotes.sources import WeightsError
from kvnotes.weights import cache_folder, load_entry, load_tokenizer
from tests.awkward import AWKWARD, CODE, PROSE
from tests.reference_bpe import ReferenceTokenizer, read_metadata
from tests.tiny_gguf import write_llama

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma-3-270m")
ORDINARY = [text for text in (*PROSE, *CODE) if text.isascii()]


@pytest.fixture(params=["gpt2", "llama"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, ReferenceTokenizer]:
    """The converted tokenizer of a tiny GGUF, byte-level or SentencePiece, and the reference."""
    write_llama(tmp_path / "tiny.gguf", kind=request.param)
    converted = build_tokenizer(Metadata(gguf.GGUFReader(tmp_path / "tiny.gguf")))
    return converted, ReferenceTokenizer(read_metadata(tmp_path / "tiny.gguf"))


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest) -> tuple[Any, ReferenceTokenizer]:
    """A registry model's tokenizer, as a run loads it, and the reference."""
    entry = load_entry(request.param)
    assert entry.gguf is not None
    folder, source = cache_folder() / "models" / entry.name, cache_folder() / "gguf" / entry.gguf.file
    if not (folder.exists() and source.exists()):
        pytest.skip(f"{entry.name} is not in the cache; `make models MODEL={entry.name}` brings it")
    return load_tokenizer(folder, converted=True), ReferenceTokenizer(read_metadata(source))


def test_there_are_200_different_strings() -> None:
    assert len(set(AWKWARD)) >= 200


def test_the_reference_merges_by_hand(tmp_path: Path) -> None:
    """Ranks: "Ġ t" 0, "a a" 1, "h e" 2, "aa aa" 3, "Ġt he" 4; the leftmost of equals first."""
    write_llama(tmp_path / "tiny.gguf")
    reference = ReferenceTokenizer(read_metadata(tmp_path / "tiny.gguf"))
    texts = {" the": ["Ġthe"], "aaaaa": ["aaaa", "a"], "12": ["1", "2"], "a<|im_end|>": ["a", "<|im_end|>"]}
    for text, pieces in texts.items():
        assert [reference.tokens[index] for index in reference.encode(text)] == pieces


def test_tiny_ids_are_the_references(tiny: tuple[Tokenizer, ReferenceTokenizer]) -> None:
    converted, reference = tiny
    got = {text: converted.encode(text, add_special_tokens=False).ids for text in AWKWARD}
    assert got == {text: reference.encode(text) for text in AWKWARD}


def test_unsupported_tokenizers_are_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    for old, new, message in (
        (b"smollm", b"kimi-x", "pre-tokenizer 'kimi-x'"),
        (b"gpt2", b"bert", "tokenizer kind 'bert'"),
        (b"<tool>", b"<tocl>", None),
    ):
        (tmp_path / "other.gguf").write_bytes(content.replace(old, new))
        metadata = Metadata(gguf.GGUFReader(tmp_path / "other.gguf"))
        if message is None:
            assert build_tokenizer(metadata).token_to_id("<tocl>") is not None
        else:
            with pytest.raises(WeightsError, match=message):
                build_tokenizer(metadata)


@pytest.mark.weights
def test_every_id_is_the_ggufs_own(real: tuple[Any, ReferenceTokenizer]) -> None:
    converted, reference = real
    assert len(converted) == len(reference.tokens)
    assert converted.convert_ids_to_tokens(list(range(len(converted)))) == reference.tokens
    got = {text: converted(text, add_special_tokens=False).input_ids for text in AWKWARD}
    assert got == {text: reference.encode(text) for text in AWKWARD}


@pytest.mark.weights
def test_ids_return_to_the_text(real: tuple[Any, ReferenceTokenizer]) -> None:
    converted, reference = real
    for text in AWKWARD:
        if "\u2581" in text and not reference.is_byte_level:
            continue  # SentencePiece writes a space so: the two cannot be told apart
        if "\x1d" in text and "ĝ" not in reference.ids:
            continue  # SmolLM2's vocabulary lacks this byte
        ids = converted(text, add_special_tokens=False).input_ids
        assert converted.decode(ids) == text


@pytest.mark.weights
def test_offsets_are_those_of_each_tokens_text(real: tuple[Any, ReferenceTokenizer]) -> None:
    converted, reference = real
    for text in ORDINARY:
        encoded = converted(text, add_special_tokens=False, return_offsets_mapping=True)
        parts = [text[start:end] for start, end in encoded.offset_mapping]
        assert "".join(parts) == text
        assert parts == [reference.decode([index]) for index in encoded.input_ids]


@pytest.mark.weights
def test_bos_stands_where_the_gguf_wants_it(real: tuple[Any, ReferenceTokenizer]) -> None:
    converted, reference = real
    wants = converted.name_or_path.endswith("gemma-3-270m")
    assert converted("a").input_ids == [converted.bos_token_id] * wants + reference.encode("a")


@pytest.mark.weights
def test_the_chat_template_opens_the_assistants_turn(real: tuple[Any, ReferenceTokenizer]) -> None:
    converted, reference = real
    if converted.chat_template is None:
        pytest.skip("a base model")
    text = converted.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = converted(text, add_special_tokens=False).input_ids
    assert ids == reference.encode(text)
    assert ids.count(reference.ids["<|im_start|>"]) == 3  # system, user, assistant


@pytest.mark.weights
def test_auto_tokenizer_agrees_on_composed_text(real: tuple[Any, ReferenceTokenizer]) -> None:
    """transformers gives Qwen2 its own class, which composes characters; other text has the same ids."""
    converted, _ = real
    auto = AutoTokenizer.from_pretrained(converted.name_or_path)
    for text in AWKWARD:
        if unicodedata.is_normalized("NFC", text) and "\u017f" not in text:
            assert auto(text).input_ids == converted(text).input_ids
