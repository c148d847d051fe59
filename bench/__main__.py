"""`python -m bench`, which `make bench` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvnotes import commandline, report
from kvnotes import config as configs
from kvnotes.config import RunConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer repeats, smaller subsets, under 4 minutes")] = False,
    model: Annotated[str | None, typer.Option(help="registry name, local folder or hub id")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:<i>")] = None,
    dtype: Annotated[str | None, typer.Option(help="precision of the forward passes")] = None,
    out: Annotated[Path, typer.Option(help="folder for the record")] = Path("results/bench"),
) -> None:
    """Time the engine beside TransformerLens, Hugging Face, nnsight and pyvene on one pair; tables and a record.

    It holds the weights twice: plain transformers is timed on a copy of its own.
    """
    flags = {"model": model, "device": device, "dtype": dtype}
    config = configs.make(RunConfig, study="locality", flags=flags)
    from bench import plan, run  # torch takes seconds to import

    run.execute(config, plan.QUICK if quick else plan.FULL, out, report.console())


if __name__ == "__main__":
    commandline.guard(app)
