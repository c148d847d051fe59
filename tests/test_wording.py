"""The wording study: planted answers, whole prompts in plain transformers, and its summary by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import transformers

from figures import wording as figure
from kvnotes import config as configs
from kvnotes import discover, effects, models, prompts, runner
from kvnotes.config import RunConfig
from kvnotes.instance import Pair, Piece, TokenPair
from kvnotes.records import Instance
from kvnotes.sweep import Trial
from probes import wording
from tasks import corrections, planted
from tests import tiny
from tests.test_knockout import instance as any_instance
from tests.test_prompts import arm, pair, tokenise


def config(tmp_path, **flags) -> RunConfig:
    return configs.make(RunConfig, study="wording", flags={"results": tmp_path, "resamples": 500, **flags})


def corrected(plain, line) -> corrections.CorrectedPair:
    """A pair with the same line, by `line(value)`, under each wording's name; only the control has the old value."""
    lines = {
        name: line(plain.base.field if name == wording.OLD else plain.target.field) for name in corrections.WORDINGS
    }
    more = {
        name: replace(
            plain, base=corrections.appended(plain.base, line), target=corrections.appended(plain.target, line)
        )
        for name, line in lines.items()
    }
    own = {key: getattr(plain, key) for key in type(plain).__dataclass_fields__}
    return corrections.CorrectedPair(**own, corrected=more)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_whole_prompts_in_plain_transformers(kind, tmp_path):
    """A correction over the base's cache is the base's whole prompt with the line in it: nothing else is stale."""
    tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    one = corrected(
        pair(arm("open", " allow"), arm("shut", " deny")), lambda value: (Piece(text=f"now {value} . ", role="text"),)
    )
    model = replace(models.load(str(tmp_path), device="cpu", dtype="float32"), tokenizer=tiny.tokenizer())
    made = tokenise(one, template=prompts.read_template(model.tokenizer, use=None, options={}))
    assert isinstance(made, TokenPair)
    trial = Trial.run(model, made, engine="rows", budget=10**7)
    measured = wording.measure(trial, config(tmp_path))
    for name, prompt in {"uncorrected": one, **one.corrected, "target": one}.items():
        text = prompt.target if name == "target" else prompt.base
        ids = tiny.tokenizer()(text.user_text + text.answer_text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = plain(torch.tensor([ids])).logits[0, -1]
        margin = float(logits[made.target_action] - logits[made.base_action])
        assert measured["margins"][name] == pytest.approx(margin, abs=1e-4), name
        full = float(torch.softmax(logits, dim=-1)[made.target_action])
        assert measured["p_full"][name] == pytest.approx(full, abs=1e-5), name
        assert measured["argmax_right"][name] == (int(logits.argmax()) == made.target_action)
    assert max(wording.identities(trial, measured).values()) < 1e-5
    assert (measured["line"]["bare_value"], measured["line"]["old_value"]) == ("now shut .", "now open .")
    assert measured["margins"]["bare_value"] != pytest.approx(measured["margins"]["old_value"], abs=1e-3)
    assert measured["margins"]["bare_value"] != pytest.approx(measured["margins"]["uncorrected"], abs=1e-3)


@pytest.mark.parametrize(("model", "recovery"), [("planted-notes", 0.0), ("planted-direct", 0.5)])
def test_planted_models_read_a_correction_as_their_mechanism_does(model, recovery, tmp_path):
    """A note that is written already cannot be corrected by a later word, while a decision that looks the field up
    itself finds two values that `=` marks, half and half."""
    loaded = models.load(model, device="cpu", dtype="float32")
    template = prompts.read_template(loaded.tokenizer, use=None, options={})
    for plain in planted.generate(layout="words_field_first", pair="field", n=6, seed=0):
        words = "state : {} = {} . ".format(plain.scenario, "{}")
        one = corrected(
            plain, lambda value, w=words: tuple(Piece(text=f"{x} ", role="text") for x in w.format(value).split())
        )
        made = prompts.tokenise(one, tokenizer=loaded.tokenizer, template=template, query=1)
        assert isinstance(made, TokenPair)
        trial = Trial.run(loaded, made, engine="rows", budget=10**7)
        measured = wording.measure(trial, config(tmp_path))
        assert measured["recovery"]["state_update"] == pytest.approx(recovery, abs=1e-3)
        assert measured["recovery"]["old_value"] == pytest.approx(0.0, abs=1e-3)
        assert measured["recovery"]["target"] == pytest.approx(1.0, abs=1e-3)


def bare(pair: Pair) -> Pair:
    return Pair(**{field.name: getattr(pair, field.name) for field in fields(Pair)})


def test_pairs_without_corrections_are_a_clear_error(tmp_path, monkeypatch):
    settings = config(tmp_path, model="planted-notes", task="planted", layout="words_field_first", n=2)
    pairs = [bare(one) for one in planted.generate(layout="words_field_first", pair="field", n=2, seed=0)]
    task = SimpleNamespace(LAYOUTS=("words_field_first",), generate=lambda **asked: pairs)
    monkeypatch.setattr(discover, "task", lambda name: task)
    with pytest.raises(wording.WordingError, match="planted pairs carry no corrections: use TASK=corrections"):
        runner.execute(wording, settings)


# --- the summary --------------------------------------------------------------------------------------------


def instance(name: str, *, passed: bool = True, **margins: float) -> Instance:
    """Base -2, target 2; p_two is made up as a tenth of the margin plus 0.5, so that means are easy to check."""
    every = {"uncorrected": -2.0, "target": 2.0, **margins}
    p = {key: 0.5 + value / 10 for key, value in every.items()}
    right = {key: value > 0 for key, value in every.items()}
    return any_instance(
        name, base=-2, target=2, passed=passed, margins=every, p_two=p, p_full={k: v / 2 for k, v in p.items()},
        argmax_right=right,
        line={"bare_value": "now shut ."},
    )  # fmt: skip


def rows() -> list[Instance]:
    def margins(start: float) -> dict[str, float]:
        return {name: start + at for at, name in enumerate([*wording.WORDINGS, wording.OLD])}

    last = margins(0)
    del last["state_update"]  # as where the tokenizer joins it with the prompt
    return [instance("a", **margins(-2)), instance("b", **margins(-1)), instance("c", passed=False, **last)]


def test_summary_by_hand(tmp_path, monkeypatch):
    """Bare value -2 and -1, each wording one more than the one before; gaps 4 and 4."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    summary = wording.summarise(rows(), config(tmp_path), floor=1e-6)
    found = {(e.name, e.gated): e for e in summary.effects}
    assert found["p_two_bare_value", True].estimate == pytest.approx((0.3 + 0.4) / 2)
    assert found["p_full_bare_value", True].estimate == pytest.approx((0.3 + 0.4) / 4)
    assert found["recovery_bare_value", True].estimate == pytest.approx((0 + 1) / 8)
    assert found["recovery_reevaluate", True].estimate == pytest.approx((4 + 5) / 8)  # past the target
    assert found["flips_explicit_override", True].estimate == pytest.approx(0.5)
    assert found["bare_value_minus_override", True].estimate == pytest.approx(-0.2)
    assert found["bare_value_minus_override", True].test.conclusion == "different"
    assert found["state_update_minus_override", True].test.margin == 0.1
    assert {name for name, gated in found if gated and found[name, gated].control} >= {
        "p_two_old_value",
        "p_two_target",
    }
    assert found["recovery_old_value", True].test.name == "TOST about 0"
    assert (found["p_two_state_update", False].n, found["p_two_bare_value", False].n) == (2, 3)
    table = summary.tables["p_two against the explicit override, l"]
    assert summary.tables["what the corrections say, in the first pair"].rows == [["bare value", "now shut ."]]
    ends = [end for effect in summary.effects if effect.name.startswith("p_") for end in (effect.low, effect.high)]
    assert all(end is None or 0 <= end <= 1 for end in ends)
    assert [row[0] for row in table.rows] == [
        label for name, label in wording.WORDINGS.items() if name != wording.REFERENCE
    ]
    assert all(row[-1] >= row[-2] for row in table.rows)  # BH never makes a p smaller


def test_too_few_scenarios_report_nothing(tmp_path):
    summary = wording.summarise(rows(), config(tmp_path), floor=1e-6)
    assert {effect.estimate for effect in summary.effects} == {None}
    assert "no probability (2 pair(s) in 2 scenario(s) pass the gate" in summary.headline
    assert set(summary.tables) == {"what the corrections say, in the first pair"}


def test_the_figure_knows_every_wording():
    assert set(figure.WORDINGS) == set(wording.LABELS)
    assert set(wording.WORDINGS) | {wording.OLD} == set(corrections.WORDINGS)
