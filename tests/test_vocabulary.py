"""Token texts: exactly the ids that occur, added without a change to older records' hashes, and never fetched."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError
from sample_record import make_record

from kvnotes import records, vocabulary, weights
from kvnotes.records import Record
from tests import tiny

IDS = [
    1,
    5,
    7,
    8,
    9,
    10,
    11,
    13,
    50,
    51,
    100,
    101,
]  # of the sample record with two pairs: 10, 11 are base's changed ids


def sample(model: str = "tiny-model") -> Record:
    return make_record(model=model, included=2, gated=0, skipped=1)


def words(ids: list[int]) -> dict[str, str]:
    return {str(i): f"w{i}" for i in ids}


def test_the_ids_of_both_arms_and_of_both_actions_occur_and_no_other():
    assert records.token_ids(sample().instances) == IDS


def test_a_vocabulary_holds_exactly_those_ids():
    made = sample()
    assert Record(**{**dict(made), "vocabulary": words(IDS)}).vocabulary["100"] == "w100"
    for ids in (IDS[:-1], [*IDS, 102]):
        with pytest.raises(ValidationError, match="exactly the token ids"):
            Record(**{**dict(made), "vocabulary": words(ids)})


def test_a_record_without_one_keeps_the_hash_it_had_before_there_were_any(tmp_path):
    made = sample()
    content = made.model_dump(mode="json", exclude={"content_hash", "timings", "plan", "vocabulary"})
    for one in content["instances"]:
        del one["seconds"]
    del content["provenance"]["created"], content["provenance"]["command"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert records.content_hash(made) == hashlib.sha256(text.encode()).hexdigest()
    assert records.content_hash(made.model_copy(update={"vocabulary": words(IDS)})) != records.content_hash(made)
    # a file that knows no such field is read as it always was
    path = tmp_path / "r.json"
    data = records.write(made, path).model_dump(mode="json")
    del data["vocabulary"]
    path.write_text(json.dumps(data))
    assert records.read(path).vocabulary == {}


def test_the_committed_records_are_still_what_their_hashes_say():
    for path in sorted(Path(__file__).parents[1].glob("results/*/locality/*.json")):
        assert records.read(path).content_hash


class Pieces:
    """A tokenizer of four tokens: one with SentencePiece's space, a cut character, a control character, a special."""

    TOKENS = ("\N{LOWER ONE EIGHTH BLOCK}the", "<0xE2>", "<0x1B>", "</s>")
    TEXTS = ("the", "\N{REPLACEMENT CHARACTER}", "\x1b", "</s>")

    def decode(self, ids, **options):
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return self.TEXTS[ids[0]]

    def convert_ids_to_tokens(self, i):
        return self.TOKENS[i]


def test_a_piece_keeps_its_space_and_holds_no_control_character():
    assert vocabulary.pieces(Pieces(), range(4)) == {
        "0": " the",
        "1": "\N{REPLACEMENT CHARACTER}",
        "2": "\N{REPLACEMENT CHARACTER}",
        "3": "</s>",
    }


LOST = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("texts", "prompt", "expected"),
    [
        (["<s>", "state", ": ok"], "state: ok", True),  # a special token before the prompt
        (["state", ": ok"], "state: ok", True),
        (["<s>", "<s>", "state", ": ok"], "state: ok", False),
        (["state", ": no"], "state: ok", False),
        (["state", ":"], "state: ok", False),
        (["caf", LOST, LOST, "s"], "caf\u00e9s", True),  # two tokens of one character
        (["caf", LOST, "s"], "cafes", False),  # which is no character of any other alphabet
        (["<s>", " state", ":", "ok"], "state: ok", None),  # SentencePiece's own space, and one that is nobody's
        (["STATE", ": ok"], "state: ok", None),
        ([], "state: ok", False),
    ],
)
def test_texts_make_a_prompt_or_all_but_its_white_space(texts, prompt, expected):
    assert vocabulary.spell(texts, prompt) is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("den", True), (" deny", True), ("deny", True), ("denys", False), ("app", False)]
)
def test_a_first_tokens_text_begins_its_word(text, expected):
    assert vocabulary.begins(text, "deny") is expected


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache that holds the tokenizer of a model called `tiny-model`."""
    monkeypatch.setenv("KVNOTES_CACHE", str(tmp_path / "cache"))
    folder = weights.cache_folder() / "models" / "tiny-model"
    tiny.tokenizer().save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path) -> Record:
    """The sample record, measured with that folder's tokenizer; its ids are within the tokenizer's few words."""
    made = make_record(included=2, gated=0, skipped=1)
    few = [one.tokens and one.tokens.model_copy(update={"base": (2, 3), "target": (2, 4)}) for one in made.instances]
    few = [one and one.model_copy(update={"base_action": 5, "target_action": 6}) for one in few]
    instances = [one.model_copy(update={"tokens": own}) for one, own in zip(made.instances, few, strict=True)]
    model = made.model.model_copy(update={"tokenizer_sha256": weights.tokenizer_sha256(folder)})
    return made.model_copy(update={"instances": tuple(instances), "model": model})


def test_an_older_record_gets_its_texts_from_the_cache(cache):
    words = tiny.tokenizer().convert_ids_to_tokens([2, 3, 4, 5, 6])
    assert vocabulary.of_record(with_tokenizer(cache)) == dict(zip("23456", words, strict=True))


def test_another_tokenizer_of_the_same_name_is_not_taken(cache):
    made = with_tokenizer(cache)
    (cache / "tokenizer.json").write_text((cache / "tokenizer.json").read_text() + "\n")
    with pytest.raises(vocabulary.NoTokenizer, match=r"tiny-model .* not in the cache"):
        vocabulary.of_record(made)


def test_nothing_is_fetched(cache, monkeypatch):
    made = with_tokenizer(cache)
    shutil.rmtree(cache)
    monkeypatch.setattr(weights, "prepare", lambda *_: pytest.fail("brought a model"))
    for name in ("tiny-model", "qwen2.5-coder-0.5b", "gemma-3-270m", "nobody/has-this"):
        there = made.model_copy(update={"model": made.model.model_copy(update={"name": name})})
        with pytest.raises(vocabulary.NoTokenizer, match="make models MODEL="):
            vocabulary.of_record(there)
