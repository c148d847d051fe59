"""The benchmark: its arithmetic by hand, its peers equal to the engine, its record and tables."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from bench import contest, peers, plan, results, run, tables, workloads
from bench.costs import Costs
from bench.measure import MemoryWatch, Timing, fit
from bench.peers import PEERS, Peer, Setup
from bench.results import PeerResult, Result, Screened
from bench.workloads import Stride
from kvnotes import config as configs
from kvnotes import models
from kvnotes.config import RunConfig
from kvnotes.discover import ROOT
from kvnotes.records import RecordError
from kvnotes.sweep import Trial
from tests import tiny
from tests.test_prompts import tokens

RECORD = ROOT / "results" / "bench" / "qwen2.5-coder-0.5b.json"
TINY = replace(
    plan.QUICK,
    name="tiny",
    lengths={"short": 0, "long": 90},
    rounds=dict.fromkeys(plan.QUICK.rounds, 2),
    strides={"short": Stride(layers=1, positions=9), "long": Stride(layers=2, positions=30)},
    subsets=dict.fromkeys(plan.QUICK.subsets, 3) | {("W1", plan.FROZEN, "short"): plan.ALL},
    optional={"short": 2, "long": 1},
    curve_lengths=(0, 60, 90),
    curve_edits=(1, 4, 16, plan.ALL),
)


# --- arithmetic by hand -----------------------------------------------------------------------------------------


def test_flops_by_hand():
    two = Costs(query=3, key_value=2, output=5, mlp=7, heads=2, d_head=3, windows=(None, None))
    # of 4 tokens the last sees 4: 2 (5 + 7) + 4 x 2 x 3 x 4 = 120 once its projections, 2 (3 + 2) = 10, are there
    assert two.cache_edit(4) == 120  # the first layer's cells are the donor's already
    assert replace(two, windows=(None, None, None)).cache_edit(4) == 120 + 10 + 120
    assert two.head_patch(0, 4) == 24 + 10 + 120
    assert two.head_patch(1, 4) == 24
    # tokens 2 and 3 see 3 and 4: 2 x 24 + 24 x 7; above, 2 x 2 keys and values for both, the rest of the last
    assert two.residual_patch(0, 2, 4) == 10 + (48 + 168) + (8 + 6 + 120)
    assert two.residual_patch(1, 2, 4) == 4 + 120
    assert two.residual_patch(1, 3, 4) == 10 + 120
    assert two.forward(2) == 20 + (48 + 24 * 3) + (8 + 6 + 24 + 48)
    three = replace(two, windows=(None, None, None))
    assert three.residual_patch(0, 2, 4) - two.residual_patch(0, 2, 4) == 20 + 48 + 168
    assert replace(two, windows=(None, 2)).cache_edit(4) == 24 + 24 * 2
    assert replace(two, windows=(None,)).forward(4) == 2 * 2 * 4 + 6 + 120


@pytest.mark.parametrize(("kind", "mlp"), [("qwen2", 3 * 32 * 48), ("mixtral", 2 * 3 * 32 * 48 + 4 * 32)])
def test_linear_weights_of_a_layer(kind, mlp, tmp_path):
    """A token uses 2 of the 4 experts, and the router."""
    model = models.load(str(tiny.checkpoint(kind, tmp_path)), device="cpu", dtype="float32")
    found = Costs.of(model)
    assert (found.query, found.key_value, found.output, found.mlp) == (32 * 32, 2 * 32 * 16, 32 * 32, mlp)
    assert (found.layers, found.heads, found.d_head) == (4, 4, 8)


def test_a_known_power_law_is_recovered():
    x = [100, 200, 500, 1000, 4000]
    line = fit(x, [3e-5 * n**1.7 for n in x])
    assert line is not None
    assert line.exponent == pytest.approx(1.7)
    assert line.stderr < 1e-6
    noisy = fit(x, [3e-5 * n**1.7 * wrong for n, wrong in zip(x, (1.1, 0.9, 1.05, 0.95, 1.0), strict=True)])
    assert noisy is not None
    assert abs(noisy.exponent - 1.7) < 3 * noisy.stderr
    assert fit(x[:2], [1.0, 2.0]) is None


def test_evenly_spaced_subsets():
    assert workloads.spread(3, 9) == (1, 4, 7)
    assert workloads.spread(9, 9) == workloads.spread(plan.ALL, 9) == tuple(range(9))
    for count in range(1, 40):
        chosen = workloads.spread(count, 40)
        assert len(set(chosen)) == count
        assert max(chosen) < 40


def test_memory_is_seen_while_it_is_held():
    with MemoryWatch(torch.device("cpu")) as watch:
        held = torch.ones(25_000_000)
        held += 1
        del held
    assert watch.peak is not None
    assert 80e6 < watch.peak < 200e6


# --- peers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def trial(request, tmp_path_factory) -> Trial:
    folder = tiny.checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return Trial.run(models.load(str(folder), device="cpu", dtype="float32"), tokens(), engine="rows", budget=10**7)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.workload} {peer.name}")
def test_each_peer_answers_as_the_engine_does(trial, peer):
    workload = workloads.build(peer.workload, trial, Costs.of(trial.model), Stride(layers=1, positions=3))
    with peers.plain_copy(trial.model) as plain:
        setup = Setup(trial=trial, plain=plain)
        if (why := peer.missing(setup)) is not None:
            pytest.skip(why)
        if peer.name == "pyvene" and "Gemma3" in type(plain).__name__:
            pytest.skip("pyvene does not know this architecture")
        theirs = peer.prepare(setup)(workload.interventions)
    ours = trial.margins(workload.interventions)
    assert list(theirs) == list(ours)
    recovery = [(ours[name] - trial.unedited.base) / trial.unedited.gap for name in ours]
    difference = max(abs(theirs[name] - ours[name]) / abs(trial.unedited.gap) for name in ours)
    assert difference < results.SAME
    assert max(map(abs, recovery)) > 1e-2  # the interventions do something


def test_a_tool_that_fails_is_left_out_with_why_and_one_of_ours_is_not():
    def fails(*_):
        raise RuntimeError("no such module")

    optional = contest.Rival(peer=Peer(name="tool", workload="W2", prepare=fails, package="torch"), chosen=())
    optional.attempt(lambda: optional.prepare(Setup(trial=None, plain=None), warm=False))  # pyright: ignore[reportArgumentType]
    assert optional.skipped == "torch failed: RuntimeError: no such module"
    ours = contest.Rival(peer=Peer(name="bridge", workload="W2", prepare=fails), chosen=())
    with pytest.raises(RuntimeError):
        ours.attempt(fails)
    gone = Peer(name="tool", workload="W2", prepare=fails, package="no_such_package")
    assert gone.missing(Setup(trial=None, plain=None)) == "no_such_package is not installed"  # pyright: ignore[reportArgumentType]


# --- the record -------------------------------------------------------------------------------------------------


def result(workload: str, *, seconds: float, peer: str, theirs: float, difference: float = 0.0) -> Result:
    timing = Timing(repeats=(2 * seconds, seconds))
    against = PeerResult(
        name=peer, timed=5, of=10, repeats=(theirs, 2 * theirs), largest_difference=difference, skipped=None
    )
    return Result(
        workload=workload,
        what="",
        length="short",
        tokens=107,
        interventions=10,
        timing=timing,
        capture=timing,
        traces=timing,
        flops=60,
        memory=300_000_000,
        peers=(against,),
    )


def test_bounds_by_hand():
    fast = result("W3", seconds=1.0, peer="TransformerLens patching", theirs=5.0)  # half of them: 10 s for all
    screened = Screened(
        length="short",
        tokens=107,
        least=0.02,
        interventions=10,
        kept=4,
        repeats=(0.1,),
        ratio=60.0,
        missed=1,
        largest_missed=0.06,
        largest_difference=0.0,
    )
    ratio, share, memory, screen = results.bounds([fast], [screened], 100.0)
    assert (ratio.measured, ratio.met, ratio.aim_met) == (10.0, True, False)
    assert (share.measured, share.met, share.aim_met) == (0.6, True, False)
    assert (memory.measured, memory.met, memory.aim_met) == (0.3, True, False)
    assert (screen.measured, screen.aim_met) == (60.0, False)  # fast, but a cell was missed
    wrong = replace(fast, peers=(replace(fast.peers[0], largest_difference=2e-4),))
    assert results.bounds([wrong], [], 100.0)[0].met is False
    unmeasured = replace(fast, memory=None, peers=(replace(fast.peers[0], repeats=(), largest_difference=None),))
    assert [one.met for one in results.bounds([unmeasured], [], 100.0)] == [None, True, None]


def test_end_to_end(tmp_path):
    flags = {"model": "planted-mixed-gqa", "task": "planted", "layout": "words_field_first", "n": 4}
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    path = run.execute(configs.make(RunConfig, study="locality", flags=flags), TINY, tmp_path, console)
    assert path.name == "planted-mixed-gqa-tiny.json"
    assert str(ROOT) not in path.read_text(encoding="utf-8")
    record = results.read(path)
    assert [(one["workload"], one["length"]) for one in record["results"]] == [
        (name, length) for name in ("W1", "W2", "W3") for length in ("short", "long")
    ]
    for one in record["results"]:
        assert one["seconds"] == min(one["timing"]["repeats"])
        assert one["with_traces"] > one["seconds"]
        assert one["share_of_peak"] > 0
        for peer in one["peers"]:
            assert peer["skipped"] or peer["largest_difference"] < results.SAME
            assert peer["skipped"] or peer["ratio"] == pytest.approx(peer["seconds"] / one["seconds"])
    frozen = record["results"][0]["peers"][0]
    assert (frozen["scaled"], frozen["subset"]) == (False, "all")
    assert record["results"][1]["peers"][0]["subset"].startswith("3 of ")
    for one in record["screened"]:
        assert 0 <= one["kept"] <= one["interventions"]
        assert (one["missed"] > 0) == (one["largest_missed"] > results.MISSED)
        assert one["largest_difference"] < results.SAME
    assert len(record["bounds"]) == 19  # 5 ratios, 3 shares and memory at two lengths, the screen at one
    assert {one["length"] for one in record["pairs"] if one["competent"]} == {"short", "long"}
    assert len(record["curves"]) == 3
    assert all(len(one["x"]) == len(one["seconds"]) for one in record["curves"])
    assert record["provenance"]["command"].endswith("--tiny")
    assert record["machine"]["matmul_peak_flops"].keys() == {"before", "after"}
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "W1, share of the matmul peak" in shown
    short = tables.markdown(record)
    assert "W2 against one head a cached bridge decode" in short
    assert "\\* timed on a part" in short
    readme = tmp_path / "README.md"
    readme.write_text(f"# x\n\n{tables.BEGIN}\nold\n{tables.END}\n\nmore\n", encoding="utf-8")
    tables.put_in_readme(readme, record)
    assert tables.in_readme(readme.read_text(encoding="utf-8")) == short.strip()
    assert readme.read_text(encoding="utf-8").endswith("\n\nmore\n")
    readme.write_text("no place", encoding="utf-8")
    with pytest.raises(RecordError):
        tables.put_in_readme(readme, record)


def test_another_file_is_no_record(tmp_path):
    for text in ("{", "[]", json.dumps({"schema": "other"})):
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        with pytest.raises(RecordError):
            results.read(tmp_path / "x.json")


def test_the_readme_shows_the_committed_record():
    shown = tables.in_readme((ROOT / "README.md").read_text(encoding="utf-8"))
    if not RECORD.exists():
        assert shown is None or shown == ""
        return
    assert shown == tables.markdown(results.read(RECORD)).strip(), "run tables.put_in_readme, or make bench"


@pytest.mark.parametrize(
    ("arguments", "code", "said"), [(["--help"], 0, "--quick"), (["--model", "no-such"], 2, "error:")]
)
def test_the_command(arguments, code, said, tmp_path):
    command = [sys.executable, "-m", "bench", "--out", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
