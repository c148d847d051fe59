"""The benchmark's tables: for the console as it goes, and in short for the README. Made from the record alone.

`python -m bench.tables results/bench/<model>.json` puts a record's short table into the README.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench import results
from kvnotes import commandline
from kvnotes.discover import ROOT
from kvnotes.records import RecordError

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
NOT_MEASURED = "-"


def show(record: Mapping[str, Any], console: Console) -> None:
    """Every table of a record."""
    found, peaks = record["machine"], record["machine"]["matmul_peak_flops"]
    console.print(
        f"{record['model']['name']}, {record['model']['dtype']} on {found.get('gpu', found['cpu'])}, "
        f"{found['threads']} threads; matmul peak {max(peaks.values()) / 1e9:.0f} GFLOP/s"
    )
    console.print(workloads(record["results"]))
    if record["screened"]:
        console.print(screened(record["screened"]))
    console.print(curves(record["curves"]))
    console.print(bounds(record["bounds"]))


def result(one: Mapping[str, Any]) -> Table:
    """One workload, as it is done, with what it is."""
    table = workloads([one])
    table.title = f"{one['workload']}: {one['what']}"
    return table


def workloads(found: Sequence[Mapping[str, Any]]) -> Table:
    """Ours, a line a workload, and under it each peer."""
    columns = ("what", "interventions", "seconds", "with traces", "ratio", "largest difference", "of peak", "memory")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for one in found:
        table.add_row(
            f"{one['workload']}, {one['tokens']} tokens",
            str(one["interventions"]),
            _seconds(one["seconds"]),
            _seconds(one["with_traces"]),
            "",
            "",
            f"{one['share_of_peak']:.2f}",
            _gigabytes(one["memory"]),
        )
        for peer in one["peers"]:
            table.add_row(f"  {peer['name']}", *_peer_cells(peer))
    return table


def _peer_cells(peer: Mapping[str, Any]) -> tuple[str, ...]:
    if peer["skipped"]:
        return NOT_MEASURED, NOT_MEASURED, "", peer["skipped"]
    timed = f"{peer['timed']} of {peer['of']}" if peer["scaled"] else str(peer["of"])
    seconds = _seconds(peer["seconds"]) + (" scaled" if peer["scaled"] else "")
    return timed, seconds, "", _times(peer["ratio"]), f"{peer['largest_difference']:.1e}"


def screened(found: Sequence[Mapping[str, Any]]) -> Table:
    """The screened W3, a line a length."""
    columns = ("what", "cells", "kept", "seconds", "ratio", "missed above 0.05", "largest missed")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for one in found:
        table.add_row(
            f"W3 screened, {one['tokens']} tokens",
            str(one["interventions"]),
            str(one["kept"]),
            _seconds(min(one["repeats"])),
            _times(one["ratio"]),
            str(one["missed"]),
            f"{one['largest_missed']:.3f}",
        )
    return table


def curves(found: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds against length and edits, with the fitted exponents."""
    table = Table("cost of", "seconds at", "exponent", box=box.SIMPLE_HEAD)
    for one in found:
        points = ", ".join(f"{x}: {_seconds(y)}" for x, y in zip(one["x"], one["seconds"], strict=True))
        line = one["fit"]
        exponent = NOT_MEASURED if line is None else f"{line['exponent']:.2f} ± {line['stderr']:.2f}"
        table.add_row(one["what"], points, exponent)
    return table


def bounds(found: Sequence[Mapping[str, Any]]) -> Table:
    """What was asked for and what was measured."""
    table = Table("bound", "prompt", "required", "aim", "measured", "met", box=box.SIMPLE_HEAD)
    for one in found:
        required = NOT_MEASURED if one["required"] is None else f"{one['required']:g}"
        table.add_row(one["name"], one["length"], required, f"{one['aim']:g}", _number(one["measured"]), _verdict(one))
    return table


def _verdict(one: Mapping[str, Any]) -> str:
    if one["measured"] is None:
        return NOT_MEASURED
    if one["aim_met"]:
        return "yes, and the aim"
    return "aim missed" if one["required"] is None else "yes" if one["met"] else "NO"


# --- in short, for the README -----------------------------------------------------------------------------------


def markdown(record: Mapping[str, Any]) -> str:
    """The record in one small table: a row a comparison, a column a prompt length."""
    found = record["results"]
    lengths = [one["length"] for one in record["pairs"]]
    tokens = {one["length"]: one["tokens"] for one in record["pairs"]}
    head = f"{record['model']['name']}, {record['machine'].get('gpu', record['machine']['cpu'])}"
    lines = [
        f"| {head}, {record['machine']['threads']} threads | "
        + " | ".join(f"{tokens[x]} tokens" for x in lengths)
        + " |",
        "|---" * (1 + len(lengths)) + "|",
    ]
    for workload in dict.fromkeys(one["workload"] for one in found):
        at = {one["length"]: one for one in found if one["workload"] == workload}
        lines.append(_line(f"**{workload}**, ours", [_ours(at[x]) for x in lengths]))
        for name in dict.fromkeys(peer["name"] for one in at.values() for peer in one["peers"]):
            cells = [_against(_named(at[x]["peers"], name)) for x in lengths]
            if set(cells) != {NOT_MEASURED}:
                lines.append(_line(f"{workload} against {name}", cells))
    if record["screened"]:
        at = {one["length"]: one for one in record["screened"]}
        cells = [_screen_cell(at[x]) if x in at else NOT_MEASURED for x in lengths]
        lines.append(_line("W3 screened, against TransformerLens patching", cells))
    lines.append(_line("memory above weights and traces", [_most_memory(found, x) for x in lengths]))
    lines += ["", "\\* timed on a part of the interventions and scaled."] if any("\\*" in x for x in lines) else []
    return "\n".join(lines)


def in_readme(text: str) -> str | None:
    """The table that stands between the README's markers; None where there are none."""
    if BEGIN not in text or END not in text:
        return None
    return text.split(BEGIN, 1)[1].split(END, 1)[0].strip()


def put_in_readme(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the README's table by the record's. Raises RecordError where it has no place for one."""
    text = path.read_text(encoding="utf-8")
    if in_readme(text) is None:
        raise RecordError(f"{path} has no lines {BEGIN} and {END} between which the table could stand")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{markdown(record)}\n{END}{after}", encoding="utf-8")


def _line(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _ours(one: Mapping[str, Any]) -> str:
    share = f"{one['share_of_peak']:.2f} of the matmul peak"
    return f"{one['interventions']} in {_seconds(one['seconds'])} s, {share}"


def _against(peer: Mapping[str, Any] | None) -> str:
    if peer is None or peer["ratio"] is None:
        return NOT_MEASURED
    return _times(peer["ratio"]) + ("\\*" if peer["scaled"] else "")


def _screen_cell(one: Mapping[str, Any]) -> str:
    return f"{_times(one['ratio'])}, {one['missed']} cells above 0.05 missed"


def _most_memory(found: Sequence[Mapping[str, Any]], length: str) -> str:
    held = [one["memory"] for one in found if one["length"] == length]
    return NOT_MEASURED if None in held else _gigabytes(max(held))


def _named(found: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((one for one in found if one["name"] == name), None)


def _seconds(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f}x" if value >= 10 else f"{value:.1f}x"


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _gigabytes(value: int | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e9:.2f} GB"


def main(record: Path) -> None:
    """Put a record's short table between the README's markers."""
    put_in_readme(ROOT / "README.md", results.read(record))


if __name__ == "__main__":
    commandline.guard(lambda: typer.run(main))
