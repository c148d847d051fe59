"""`kvnotes ls`, `export` and `verify`: every record is listed, every number is a row, and no forgery passes."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_record import make_record, measured
from typer.testing import CliRunner

from kvnotes import config as configs
from kvnotes import discover, export, listing, measures, proofs, records, runner, verify, vocabulary
from kvnotes.cli import app
from kvnotes.discover import ROOT
from kvnotes.records import Check, Record, Tokens
from probes import locality
from tasks import gated

RESULTS = ROOT / "results"
LOCALITY = RESULTS / "qwen2.5-coder-0.5b" / "locality" / "table_field_first.json"
OTHER_WEIGHTS = "cc324af0"  # the 1.5B file's SHA-256 begins so


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def wrong(path: Path) -> dict[str, list[str]]:
    """What `verify` finds wrong with a record, by part."""
    return told(path, "wrong", "unreadable")


def told(path: Path, *states: str) -> dict[str, list[str]]:
    """What `verify` finds of these states, by part."""
    found: dict[str, list[str]] = {}
    for one in verify.verify(path).findings:
        if one.state in states:
            found.setdefault(one.part, []).append(one.what)
    return found


# --- ls -----------------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A current record, one of an older schema, a damaged one, and one whose setting is gone."""
    record, folder = records.read(LOCALITY), tmp_path / "results" / "m"
    records.write(record, folder / "locality" / "good.json")
    older = json.loads(LOCALITY.read_text()) | {"schema_version": 0}
    for name, text in {"older": json.dumps(older), "damaged": LOCALITY.read_text()[:5000]}.items():
        (folder / "locality" / f"{name}.json").write_text(text)
    settings = {**record.provenance.config, "colour": "red"}
    made = record.provenance.model_copy(update={"config": settings, "config_hash": configs.hash_of(settings)})
    records.write(record.model_copy(update={"provenance": made}), folder / "locality" / "gone.json")
    records.write(make_record().model_copy(update={"study": "lost"}), folder / "lost" / "l.json")
    return tmp_path / "results"


def test_ls_lists_every_record_and_says_why_one_is_not_current(results: Path) -> None:
    code, output = run("ls", "--results", results)
    assert code == 0
    lines = {
        tuple(line.split()[1:3]): line for line in output.splitlines() if line.startswith((" qwen", " m ", " tiny"))
    }
    good = lines["locality", "good"]
    assert "qwen2.5-coder-0.5b" in good
    assert f"{records.read(LOCALITY).provenance.created[:10]}   30 of 48   current" in good
    assert "table_field_first: field-only -0.01" in good
    assert "-            -          stale" in lines["locality", "older"]
    assert "damaged" in lines["locality", "damaged"]
    assert "30 of 48   stale" in lines["locality", "gone"]
    assert "stale" in lines["lost", "l"]
    assert "m/locality/older: stale: schema_version 0 is older than 1" in output
    assert "m/locality/damaged: damaged: not JSON" in output
    assert "m/locality/gone: stale: the study no longer takes its setting colour" in output
    assert "m/lost/l: stale: unknown study 'lost'" in output


def test_a_record_without_what_its_study_measures_now_is_stale(tmp_path: Path) -> None:
    record = records.read(LOCALITY)
    old = tuple(
        one.model_copy(update={"measures": {k: v for k, v in one.measures.items() if k != "margins"}})
        for one in record.instances
    )
    records.write(record.model_copy(update={"instances": old}), tmp_path / "m" / "locality" / "l.json")
    _, output = run("ls", "--results", tmp_path)
    assert "stale: no instance has margins, which the study now measures" in output


def test_a_measure_that_a_model_cannot_give_makes_no_record_stale(tmp_path: Path) -> None:
    """Class means need keys that can be moved; without them a fresh record of knockout has no `mean`."""
    record = records.read(RESULTS / "qwen2.5-coder-0.5b" / "knockout" / "table_field_first.json")

    def without(name: str) -> list[str]:
        kept = [{k: v for k, v in one.measures.items() if k != name} for one in record.instances]
        few = [one.model_copy(update={"measures": own}) for one, own in zip(record.instances, kept, strict=True)]
        return [*listing.misfits(record.model_copy(update={"instances": tuple(few)}))]

    assert without("mean") == []
    assert without("block") == ["no instance has block, which the study now measures"]


def test_a_record_whose_pairs_the_task_no_longer_makes_is_stale(monkeypatch) -> None:
    record = records.read(LOCALITY)
    gone = {one.scenario for one in record.instances[:1]}
    monkeypatch.setattr(gated, "SCENARIOS", tuple(one for one in gated.SCENARIOS if one.id not in gone))
    (why,) = listing.misfits(record)
    assert re.match(r"the task makes other pairs of its settings now: \d+ of its 48 are among them", why)


def test_every_committed_record_is_current() -> None:
    code, output = run("ls", "--results", RESULTS)
    assert code == 0
    assert "stale" not in output
    assert "damaged" not in output


# --- export -------------------------------------------------------------------------------------------------

# margins are -4 and 4: a margin of 0 is R = 0.5; positions 3 and 4 lie between the changed one and the query block
TOKENS = Tokens(
    base=(1, 2, 3, 4, 5, 6), target=(1, 2, 9, 4, 5, 6), changed=(2,), query=(5,), base_action=7, target_action=8
)
SPANS = {"text": ((0, 2),), "field": ((2, 3),), "delimiter": ((3, 4),), "action.base": ((4, 5),), "request": ((5, 6),)}


def one_record(study: str, **found: object) -> Record:
    """One measured instance and a skipped one of a study, on a model of two layers, four heads and two KV heads."""
    here = measured("a", base=-4.0, target=4.0, measures=found, tokens=TOKENS, spans=SPANS, balance={"order": "first"})
    gone = here.model_copy(
        update={"id": "b", "status": "skipped", "reason": "too long", "gate": None, "tokens": None, "measures": {}}
    )
    instances = (here, gone)
    made = make_record()
    update = {"study": study, "instances": instances, "inclusion": records.count_inclusion(instances)}
    return made.model_copy(update=update)


def table(path: Path) -> dict[str, dict[str, str]]:
    """An exported table's rows by intervention."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["intervention"] for row in rows}) == len(rows)
    return {row["intervention"]: row for row in rows}


def test_export_has_a_row_for_each_instance_and_number_with_its_place(tmp_path: Path) -> None:
    record = one_record("suffix", notes=4.0, single=[0.0, -4.0], map=[[-4.0, -4.0], [-2.0, 4.0]], counts=[1, 2])
    records.write(record, tmp_path / "r.json")
    code, output = run("export", tmp_path / "r.json", "--out", tmp_path / "t.csv")
    assert (code, output.strip()) == (0, f"10 rows: {tmp_path / 't.csv'}")
    rows = table(tmp_path / "t.csv")
    half = rows["single.delimiter[0]"]
    assert {name: half[name] for name in ("position", "slot", "layer", "head", "value", "margin", "recovery")} == {
        "position": "3", "slot": "delimiter[0]", "layer": "", "head": "", "value": "0.0", "margin": "0.0",
        "recovery": "0.5",
    }  # fmt: skip
    assert {name: half[name] for name in ("model", "study", "task", "instance", "scenario", "domain", "status")} == {
        "model": "tiny-model", "study": "suffix", "task": "gated", "instance": "a", "scenario": "a", "domain": "d",
        "status": "included",
    }  # fmt: skip
    assert (half["base_margin"], half["target_margin"], half["gap"], half["balance_order"]) == (
        "-4.0",
        "4.0",
        "8.0",
        "first",
    )
    assert (rows["single.action.base[0]"]["slot"], rows["single.action.base[0]"]["recovery"]) == (
        "action.base[0]",
        "0.0",
    )
    quarter = rows["map.1.delimiter[0]"]
    assert (quarter["layer"], quarter["position"], quarter["recovery"]) == ("1", "3", "0.25")
    assert rows["notes"]["recovery"] == "1.0"
    assert (rows["counts.1"]["value"], rows["counts.1"]["margin"], rows["counts.1"]["recovery"]) == ("2.0", "", "")
    skipped = rows[""]
    assert (skipped["instance"], skipped["status"], skipped["reason"], skipped["value"]) == (
        "b",
        "skipped",
        "too long",
        "",
    )


def test_export_names_heads_by_layer_and_takes_no_attention_for_a_margin(tmp_path: Path) -> None:
    record = one_record(
        "heads",
        alone=[0.0] * 5 + [4.0] + [0.0] * 2,
        kv=[-4.0, -4.0, -4.0, 0.0],
        places={"write": {"positions": [3], "margins": {"alone": {"1.2": 0.0}, "top": {"3": 4.0}}}},
        attention={"heads": {"action": [0.5] * 8}},
        per_layer={"heads": 4, "kv_heads": 2},
    )
    export.write([record], tmp_path / "t.csv")
    rows = table(tmp_path / "t.csv")
    assert [rows["alone.1.1"][name] for name in ("layer", "head", "kv_head", "recovery")] == ["1", "1", "", "1.0"]
    assert [rows["kv.1.1"][name] for name in ("layer", "head", "kv_head", "recovery")] == ["1", "", "1", "0.5"]
    one = rows["places.write.margins.alone.1.2"]
    assert [one[name] for name in ("layer", "head", "recovery")] == ["1", "2", "0.5"]
    top = rows["places.write.margins.top.3"]
    assert [top[name] for name in ("layer", "head", "recovery")] == ["", "", "1.0"]
    assert {name for name, row in rows.items() if row["margin"] == ""} >= {
        "attention.heads.action.0", "per_layer.heads", "places.write.positions.0",
    }  # fmt: skip


def test_export_gives_a_curve_up_to_a_layer_the_last_layer_that_is_edited(tmp_path: Path) -> None:
    """`up_to` 1 is the base's cells in layer 0 alone; `from` 1 in layer 1 and above."""
    export.write(
        [one_record("knockout", **{"up_to": {"8": {"1": 4.0}}, "from": {"8": {"1": 0.0}}})], tmp_path / "t.csv"
    )
    rows = table(tmp_path / "t.csv")
    assert [rows["up_to.8.1"][name] for name in ("layer", "recovery")] == ["0", "1.0"]
    assert [rows["from.8.1"][name] for name in ("layer", "recovery")] == ["1", "0.5"]


def test_export_of_a_committed_record_has_the_recoveries_that_it_has(tmp_path: Path) -> None:
    record = records.read(LOCALITY)
    export.write([record], tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        found = {(row["instance"], row["intervention"]): row["recovery"] for row in csv.DictReader(file)}
    for one in record.instances:
        for name, value in one.measures["recovery"].items():
            assert float(found[one.id, f"margins.{name}"]) == pytest.approx(value, abs=1e-9)


def test_export_to_parquet_is_the_same_table_with_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    made = [one_record("suffix", notes=4.0, single=[0.0, -4.0]), one_record("locality", margins={"notes_only": 0.0})]
    assert export.write(made, tmp_path / "t.parquet") == 6
    found = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["study"] for row in found] == ["suffix"] * 4 + ["locality"] * 2
    assert (found[1]["position"], found[1]["recovery"], found[1]["layer"]) == (3, 0.5, None)


def test_parquet_without_pyarrow_and_another_ending_say_what_to_do(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(export.ExportError, match=r"needs pyarrow: `pip install '\.\[export\]'`"):
        export.write([one_record("suffix", notes=4.0)], tmp_path / "t.parquet")
    with pytest.raises(export.ExportError, match=r"a table is a \.csv or a \.parquet file"):
        export.write([], tmp_path / "t.xlsx")
    assert list(tmp_path.iterdir()) == []


def test_every_study_says_which_of_its_measures_are_margins() -> None:
    for study in discover.studies():
        assert hasattr(discover.study(study), "MARGINS"), study


# --- verify: what holds -------------------------------------------------------------------------------------

COMMITTED = sorted(RESULTS.glob("*/*/*.json"))
SLOW = {"linear"}  # its probes are fitted anew


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, marks=[pytest.mark.slow] if path.parent.name in SLOW else [], id=f"{path.relative_to(RESULTS)}"
        )
        for path in COMMITTED
    ],
)
def test_every_committed_record_holds(path: Path) -> None:
    assert wrong(path) == {}


def test_committed_records_do_not_contradict_each_other() -> None:
    quick = [path for path in COMMITTED if path.parent.name in ("locality", "dissociation", "wording")]
    assert verify.between([verify.verify(path) for path in quick]) == []


def test_verify_needs_no_torch() -> None:
    paths = [str(RESULTS / "qwen2.5-coder-0.5b" / name) for name in ("locality", "injection", "knockout", "wording")]
    code = (
        "import sys; from typer.testing import CliRunner; from kvnotes.cli import app\n"
        f"done = CliRunner().invoke(app, ['verify', *{paths!r}])\n"
        "print(done.exit_code, sorted(set(sys.modules) & {'torch', 'transformers', 'transformer_lens', 'sae_lens'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "some"),
    [
        ("heads", {"draws": 3, "write_draws": 2, "confirmed": 12}),
        ("scrubbing", {"draws": 3, "wrong": 2}),
        ("direction", {"draws": 3}),
    ],
)
def test_a_planted_models_record_holds_and_every_margin_it_declares_is_there(study, some, tmp_path: Path) -> None:
    module = discover.study(study)
    flags = {"model": "planted-mixed", "task": "planted", "layout": "words_field_first", "n": 12, "resamples": 500}
    config = configs.make(module.Settings, study=study, flags={**flags, **some, "results": tmp_path})
    record = runner.execute(module, config)
    path = runner.Study(module=module, config=config).path
    assert wrong(path) == {}
    declared = {path for paths in measures.declared(study).values() for path in paths}
    found = {
        number.keys
        for one in record.instances
        for number in measures.numbers(one, measures.declared(study), record.model)
        if number.is_margin
    }
    for path in declared:
        assert any(
            len(keys) >= len(path) and all(part in ("*", key) for part, key in zip(path, keys, strict=False))
            for keys in found
        ), path


# --- verify: what does not ----------------------------------------------------------------------------------


def forged(tmp_path: Path, change: Callable[[Record], Record], *, source: Path = LOCALITY) -> Path:
    """A committed record, changed, its content hash made anew."""
    path = tmp_path / "forged.json"
    records.write(with_vocabulary(change(records.read(source))), path)
    assert records.read(path).content_hash  # nothing but `verify` minds it
    return path


def with_vocabulary(record: Record) -> Record:
    """A forger's texts of exactly the tokens that the changed instances hold, without which it is no record."""
    if not record.vocabulary:
        return record
    ids = map(str, records.token_ids(record.instances))
    return record.model_copy(update={"vocabulary": {one: record.vocabulary.get(one, "&") for one in ids}})


def with_summary(record: Record) -> Record:
    """A forger's last step: the summary that the changed instances give."""
    study = runner.study_of(record)
    return record.model_copy(update={"summary": runner.summary_of(study, record, LOCALITY)})


def with_proofs(record: Record) -> Record:
    """A thorough forger's step before: the checks and the noise floor that the changed instances give."""
    made = proofs.identities([one for one in record.instances if one.status != "skipped"], locality.identities)
    checks = tuple(one.model_copy(update={"value": made.get(one.name, one.value)}) for one in record.checks)
    floor = max(made[proofs.DECODE], float(record.model.self_check[proofs.DECODE].value or 0.0))
    model = record.model.model_copy(update={"noise_floor": floor})
    return record.model_copy(update={"checks": checks, "model": model})


def test_a_changed_mean_is_found(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        first, *rest = record.summary.effects
        other = first.model_copy(update={"estimate": first.estimate + 0.01, "high": first.high + 0.01})
        return record.model_copy(update={"summary": record.summary.model_copy(update={"effects": (other, *rest)})})

    found = wrong(path := forged(tmp_path, change))
    assert [*found] == ["summary"]
    effect = records.read(LOCALITY).summary.effects[0]
    said, actual = f"{effect.estimate + 0.01:.9g}", f"{effect.estimate:.9g}"
    where = f"effects: {effect.name} (table_field_first, gated): estimate"
    assert found["summary"][0] == f"{where} is {said} in the record, {actual} recomputed"
    code, output = run("verify", path)
    assert code == 1
    assert f"FAIL {path}" in output


def test_a_dropped_instance_is_found_though_inclusion_and_summary_are_made_anew(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        kept = record.instances[1:]
        update = {"instances": kept, "inclusion": records.count_inclusion(kept)}
        return with_summary(with_proofs(record.model_copy(update=update)))

    gone = records.read(LOCALITY).instances[0].id
    assert wrong(forged(tmp_path, change)) == {"instances": [f"{gone} is missing: the settings give it"]}


def test_a_changed_seed_is_found_in_an_instance(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        first, *rest = record.instances
        return record.model_copy(update={"instances": (first.model_copy(update={"seed": 7}), *rest)})

    name = records.read(LOCALITY).instances[0].id
    assert wrong(forged(tmp_path, change)) == {"instances": [f"{name}: seed is 7 in the record, 0 recomputed"]}


def test_a_changed_seed_is_found_in_the_settings_though_their_hash_and_the_summary_are_made_anew(tmp_path) -> None:
    def change(record: Record) -> Record:
        settings = {**record.provenance.config, "seed": 7}
        update = {"seed": 7, "config": settings, "config_hash": configs.hash_of(settings)}
        instances = tuple(one.model_copy(update={"seed": 7}) for one in record.instances)
        made = record.provenance.model_copy(update=update)
        return with_summary(record.model_copy(update={"provenance": made, "instances": instances}))

    found = wrong(forged(tmp_path, change))
    assert "instances" in found
    assert "summary" not in found


def test_a_changed_seed_is_found_where_head_and_settings_disagree(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        return record.model_copy(update={"provenance": record.provenance.model_copy(update={"seed": 7})})

    assert wrong(forged(tmp_path, change)) == {"settings": ["seed is 7, and in the settings 0"]}


def test_a_swapped_model_hash_is_found_by_the_registry(tmp_path: Path) -> None:
    other = records.read(RESULTS / "qwen2.5-coder-1.5b" / "locality" / "table_field_first.json").model.weights_sha256
    assert other is not None
    assert other.startswith(OTHER_WEIGHTS)

    def change(record: Record) -> Record:
        return record.model_copy(update={"model": record.model.model_copy(update={"weights_sha256": other})})

    assert wrong(forged(tmp_path, change)) == {
        "model": [f"weights_sha256 is {other[:12]}, that of qwen2.5-coder-0.5b in the registry 1d9614638d18"]
    }


def test_a_swapped_model_hash_is_found_by_another_record_of_a_model_that_the_registry_lacks(tmp_path: Path) -> None:
    def named(weights: str) -> Callable[[Record], Record]:
        def change(record: Record) -> Record:
            settings = {**record.provenance.config, "model": "own"}
            update = {"config": settings, "config_hash": configs.hash_of(settings)}
            return record.model_copy(
                update={
                    "model": record.model.model_copy(update={"name": "own", "weights_sha256": weights * 64}),
                    "provenance": record.provenance.model_copy(update=update),
                }
            )

        return change

    folder = tmp_path / "results" / "own" / "locality"
    for name, weights in {"a": "1", "b": "2"}.items():
        records.write(named(weights)(records.read(LOCALITY)), folder / f"{name}.json")
    code, output = run("verify", tmp_path / "results")
    assert code == 1
    assert (
        f"FAIL {folder / 'b.json'}\n  model: weights_sha256 of own differ from those in {folder / 'a.json'}" in output
    )
    assert run("verify", folder / "a.json")[0] == 0


def test_the_same_text_with_other_tokens_is_found(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        first, *rest = record.instances
        tokens = first.tokens.model_copy(update={"target_action": 5})
        return record.model_copy(update={"instances": (first.model_copy(update={"tokens": tokens}), *rest)})

    found = wrong(forged(tmp_path, change))
    assert [*found] == ["tokens", "vocabulary"]
    assert "begins with token" in found["tokens"][0]
    assert "does not begin with" in found["vocabulary"][0]


def test_a_gate_that_its_margins_do_not_give_is_found(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        at, one = next((i, one) for i, one in enumerate(record.instances) if one.status == "incompetent")
        let_in = one.model_copy(
            update={"status": "included", "reason": None, "gate": one.gate.model_copy(update={"passed": True})}
        )
        instances = (*record.instances[:at], let_in, *record.instances[at + 1 :])
        return with_summary(
            record.model_copy(update={"instances": instances, "inclusion": records.count_inclusion(instances)})
        )

    assert [*wrong(forged(tmp_path, change))] == ["gate"]


def test_a_changed_plan_and_a_list_of_the_wrong_length_are_found(tmp_path: Path) -> None:
    suffix = RESULTS / "qwen2.5-coder-0.5b" / "specificity" / "table_field_first.json"

    def change(record: Record) -> Record:
        plan = json.loads(json.dumps(dict(record.plan)))
        best = plan["tested"]["table_field_first"]["tested_with"]["0"]["top"]
        best[:2] = best[1], best[0]
        return record.model_copy(update={"plan": plan})

    assert [*wrong(forged(tmp_path, change, source=suffix))] == ["plan"]
    record = one_record("suffix", single=[0.0])
    found = list(measures.misshapen(record.instances[0], measures.declared("suffix"), record.model))
    assert found == ["single has 1 values, one for each of 2 slots are wanted"]


# --- verify: files ------------------------------------------------------------------------------------------


def test_an_edited_number_is_found_by_the_content_hash_and_the_rest_is_still_looked_at(tmp_path: Path) -> None:
    data = json.loads(LOCALITY.read_text())
    data["inclusion"]["included"] += 1
    (tmp_path / "r.json").write_text(json.dumps(data))
    found = wrong(tmp_path / "r.json")
    assert [*found] == ["content hash", "inclusion"]
    assert found["inclusion"] == ["included is 31 in the record, 30 recomputed"]


def test_what_is_no_record_is_a_read_error(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    code, output = run("verify", tmp_path / "r.json", LOCALITY)
    assert code == 2
    assert "file: not JSON" in output
    assert f"holds {LOCALITY}" in output  # the others are verified all the same
    done = subprocess.run(
        [sys.executable, "-m", "kvnotes.cli", "verify", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {tmp_path}: no record in this folder; they stand under results/<model>/<study>/.\n",
    )


def test_an_array_file_that_is_another_is_found(tmp_path: Path) -> None:
    source = RESULTS / "qwen2.5-coder-0.5b" / "timing" / "table_field_first.json"
    path = tmp_path / source.name
    path.write_bytes(source.read_bytes())
    data = bytearray(source.with_suffix(".safetensors").read_bytes())
    data[-1] ^= 1
    path.with_suffix(".safetensors").write_bytes(data)
    found = wrong(path)
    assert [*found] == ["arrays"]
    assert "its SHA-256 is not the one in" in found["arrays"][0]


# --- verify: what a forger may forget -----------------------------------------------------------------------


def with_model(**update: Any) -> Callable[[Record], Record]:
    return lambda record: record.model_copy(update={"model": record.model.model_copy(update=update)})


def with_summary_of(**update: Any) -> Callable[[Record], Record]:
    return lambda record: record.model_copy(update={"summary": record.summary.model_copy(update=update)})


def with_checks(change: Callable[[dict[str, Check]], dict[str, Check]]) -> Callable[[Record], Record]:
    def changed(record: Record) -> Record:
        return record.model_copy(update={"checks": tuple(change({one.name: one for one in record.checks}).values())})

    return changed


def with_first(**update: Any) -> Callable[[Record], Record]:
    """Other fields of the first instance."""

    def change(record: Record) -> Record:
        first, *rest = record.instances
        return record.model_copy(update={"instances": (first.model_copy(update=update), *rest)})

    return change


def test_an_effect_that_stands_twice_is_no_record(tmp_path: Path) -> None:
    """The first would be drawn, the last compared."""
    data = json.loads(LOCALITY.read_text())
    first = data["summary"]["effects"][0]
    data["summary"]["effects"].insert(0, first | {"estimate": 0.5, "high": 0.6})
    (tmp_path / "r.json").write_text(json.dumps(data))
    code, output = run("verify", tmp_path / "r.json")
    assert code == 2
    assert "the effect 'field_only' (table_field_first, gated) occurs more than once" in output


def test_effects_in_another_order_are_found(tmp_path: Path) -> None:
    change = with_summary_of(effects=records.read(LOCALITY).summary.effects[::-1])
    assert wrong(forged(tmp_path, change)) == {"summary": ["effects: they stand in another order than recomputed"]}


@pytest.mark.parametrize("dropped", [None, *proofs.IDENTITIES, "notes-only equals its mirror image"])
def test_checks_that_are_left_out_are_found(dropped: str | None, tmp_path: Path) -> None:
    def without(checks: dict[str, Check]) -> dict[str, Check]:
        return {} if dropped is None else {name: one for name, one in checks.items() if name != dropped}

    found = wrong(forged(tmp_path, with_checks(without)))
    assert [*found] == ["checks"]
    assert any((dropped or proofs.PREFIX) in what for what in found["checks"])


@pytest.mark.parametrize(
    ("name", "update", "what"),
    [
        ("notes-only equals its mirror image", {"value": 0.0}, "is 0 in the record, "),
        (proofs.EMPTY, {"value": 2e-4}, "is 0.0002 (bound 0.0001), and said to have passed"),
        (proofs.WHOLE, {"bound": 1.0}, "is 1.0, 0.0001 is wanted"),
        (proofs.DECODE, {"value": 0.0}, "is 0 in the record, "),
    ],
)
def test_a_check_with_another_value_or_bound_is_found(name, update, what, tmp_path: Path) -> None:
    found = wrong(forged(tmp_path, with_checks(lambda all_: all_ | {name: all_[name].model_copy(update=update)})))
    assert [*found] == ["checks"]
    assert any(name in one and what in one for one in found["checks"])


@pytest.mark.parametrize(
    ("name", "update", "what"),
    [
        (proofs.BRIDGE, {"value": 0.5}, "is 0.5 (bound 0.002), and said to have passed"),
        (proofs.EDIT, {"value": 0.0}, "is 0.0 (bound 0.00024"),
        (proofs.MASKS, {"bound": 5.0}, "is 5.0, 0.002 is wanted"),
        (proofs.HOOK, {"bound": -1.0}, "is -1.0, 0.00024"),
        (proofs.SAME, None, "is missing"),
    ],
)
def test_a_self_check_that_does_not_hold_is_found(name, update, what, tmp_path: Path) -> None:
    own = dict(records.read(LOCALITY).model.self_check)
    made = own.pop(name)
    own |= {} if update is None else {name: made.model_copy(update=update)}
    found = wrong(forged(tmp_path, with_model(self_check=own)))
    assert [*found] == ["checks"]
    assert any(name in one and what in one for one in found["checks"])


def test_a_noise_floor_other_than_the_noise_is_found(tmp_path: Path) -> None:
    """Raised, all effects would be unresolved, and no one would say that the raised floor is the reason."""

    def change(record: Record) -> Record:
        return with_summary(with_model(noise_floor=0.5)(record))

    floor = f"{records.read(LOCALITY).model.noise_floor:.9g}"
    assert wrong(forged(tmp_path, change)) == {"checks": [f"noise floor is 0.5 in the record, {floor} recomputed"]}


def test_another_title_span_recovery_and_note_are_found(tmp_path: Path) -> None:
    first = records.read(LOCALITY).instances[0]
    other = {"action.base": "action.target", "action.target": "action.base"}
    spans = {other.get(name, name): ranges for name, ranges in first.spans.items()}
    nulled = {**first.measures, "recovery": {**first.measures["recovery"], "notes_only": None}}
    without = {**first.measures, "recovery": None}
    note = f"{runner.RECOMPUTED}{'0' * 40} and found to hold"
    changes = [
        ("title", lambda record: record.model_copy(update={"title": "Locality: proved"})),
        ("tokens", with_first(spans=spans)),
        ("measures", with_first(measures=nulled)),
        ("measures", with_first(measures=without)),
        ("summary", with_summary_of(notes=(note,))),
    ]
    for part, change in changes:
        assert [*wrong(forged(tmp_path, change))] == [part]
    assert wrong(forged(tmp_path, with_summary_of(notes=(note[: -len(" and found to hold")],)))) == {}


def test_texts_that_are_not_the_prompts_are_found(tmp_path: Path) -> None:
    source = RESULTS / "smollm2-135m" / "locality" / "table_field_first.json"
    record = records.read(source)
    try:
        texts = vocabulary.of_record(record)
    except vocabulary.NoTokenizer as missing:
        pytest.skip(str(missing))

    def change(words: dict[str, str]) -> dict[str, list[str]]:
        return wrong(forged(tmp_path, lambda one: one.model_copy(update={"vocabulary": words}), source=source))

    assert change(texts) == {}
    tokens = record.instances[0].tokens
    assert tokens is not None
    found = change({**texts, str(tokens.changed and tokens.base[tokens.changed[0]]): "elsewhere"})
    assert [*found] == ["vocabulary"]
    assert found["vocabulary"][0] == f"{record.instances[0].id}: the texts of its tokens are not its prompt"
    told_action = change({**texts, str(tokens.target_action): "elsewhere"})
    assert any("does not begin with 'elsewhere'" in what for what in told_action["vocabulary"])


# --- verify: what it cannot know ----------------------------------------------------------------------------


def test_what_no_registry_holds_is_said_not_to_be_checked(tmp_path: Path) -> None:
    code, output = run("verify", LOCALITY)
    assert code == 0
    assert "  model: not checked: tokenizer_sha256, files_sha256: the registry has none" in output
    settings = {**records.read(LOCALITY).provenance.config, "model": "own"}
    made = records.read(LOCALITY).provenance.model_copy(
        update={"config": settings, "config_hash": configs.hash_of(settings)}
    )
    path = forged(tmp_path, lambda one: with_model(name="own")(one.model_copy(update={"provenance": made})))
    code, output = run("verify", path)
    assert code == 0
    hashes = "weights_sha256, tokenizer_sha256, files_sha256"
    assert f"  model: not checked: {hashes}: own is no model of the registry" in output


def test_a_summary_that_was_not_made_again_is_no_record_that_holds(monkeypatch) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setattr(runner, "summary_of", missing)
    code, output = run("verify", LOCALITY)
    assert code == 2
    assert f"partly {LOCALITY}" in output
    assert "  summary: not checked: sklearn is not installed" in output
    left, gate = verify.Finding(part="summary", what="", state="unchecked"), verify.Finding(part="gate", what="")
    assert verify.code([left, gate]) == 1  # what is wrong is wrong all the same


def test_records_of_a_study_that_is_gone_are_not_passed_over(results: Path) -> None:
    (results / "m" / "bench").mkdir()
    (results / "m" / "bench" / "b.json").write_text('{"schema": "another"}')
    assert {path.relative_to(results / "m").as_posix() for path in listing.collect([results])} == {
        "locality/good.json", "locality/older.json", "locality/damaged.json", "locality/gone.json", "lost/l.json",
    }  # fmt: skip
    found = told(results / "m" / "lost" / "l.json", "wrong")
    assert any("unknown study 'lost'" in what for what in found["settings"])


def test_the_differences_that_are_shown_are_the_first(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        return record.model_copy(
            update={"instances": tuple(one.model_copy(update={"seed": 7}) for one in record.instances)}
        )

    first = [one.id for one in records.read(LOCALITY).instances[: verify.MOST]]
    found = wrong(forged(tmp_path, change))["instances"]
    assert found == [*(f"{name}: seed is 7 in the record, 0 recomputed" for name in first), "and 43 more"]


# --- verify: older code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [True, False, None])
def test_a_summary_of_older_code_is_called_so(changed: bool | None, tmp_path: Path, monkeypatch) -> None:
    def change(record: Record) -> Record:
        first, *rest = record.summary.effects
        return with_summary_of(effects=(first.model_copy(update={"label": "as it was called"}), *rest))(record)

    monkeypatch.setattr(verify, "changed_since", lambda *_: changed)
    path = forged(tmp_path, change)
    what = 'label is "as it was called" in the record, "field-only recovery" recomputed'
    assert wrong(path) == {"summary": [f"effects: field_only (table_field_first, gated): {what}"]}
    read = records.read(LOCALITY)
    anew = [note.removeprefix(runner.RECOMPUTED) for note in read.summary.notes if note.startswith(runner.RECOMPUTED)]
    commit = ([read.provenance.git_commit or "", *anew][-1])[:12]
    hint = (
        f"the summary is of older code: it was made at commit {commit}, and the code has changed since. "
        f"If nobody changed its numbers, `kvnotes summarise {path}` makes it anew."
    )
    assert told(path, "hint") == ({"summary": [hint]} if changed else {})
    code, output = run("verify", path)
    assert code == 1
    assert (hint in output) is bool(changed)


@pytest.mark.parametrize("changed", [True, False])
def test_pairs_of_an_older_task_are_called_so_and_nothing_else_is_held_against_them(changed, monkeypatch) -> None:
    """As after docs/add-a-scenario.md: the seed shuffles other scenarios, so the settings give other pairs."""
    gone = {one.scenario for one in records.read(LOCALITY).instances[:1]}
    monkeypatch.setattr(gated, "SCENARIOS", tuple(one for one in gated.SCENARIOS if one.id not in gone))
    monkeypatch.setattr(verify, "changed_since", lambda _, sources: changed and sources == ("tasks",))
    assert [*wrong(LOCALITY)] == ["instances"]
    hints = told(LOCALITY, "hint")
    assert [*hints] == (["instances"] if changed else [])
    if changed:
        assert hints["instances"][0].startswith("the task's code has changed since the record's commit ")
    assert run("verify", LOCALITY)[0] == 1


def test_whether_code_changed_since_a_commit_is_read_from_its_history(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        named = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        done = subprocess.run(["git", *named, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    for folder in ("tasks", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("first")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "docs" / "a.txt").write_text("second")
    assert verify.changed_since(commit, ["tasks"], root=tmp_path) is False
    (tmp_path / "tasks" / "a.txt").write_text("second")
    assert verify.changed_since(commit, ["tasks"], root=tmp_path) is True
    assert verify.changed_since("0" * 40, ["tasks"], root=tmp_path) is None
    assert verify.changed_since("--output=x", ["tasks"], root=tmp_path) is None
