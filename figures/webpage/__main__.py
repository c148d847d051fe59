"""`python -m figures.webpage RESULTS --out FILE`: write the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvnotes.commandline import guard

OUT = Path("figures/out/report.html")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder of records.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The HTML file.")] = OUT,
    model: Annotated[list[str] | None, typer.Option(help="A model to show, in this order; all where none.")] = None,
) -> None:
    """Write one HTML page with every record under RESULTS: summaries, figures and a view of the tokens."""
    from figures.webpage import data, page  # matplotlib takes half a second; `--help` must not wait for it
    from kvnotes.records import write_atomically

    made = page.render(data.load(results, model or [])).encode()
    write_atomically(made, out)
    typer.echo(f"{out} ({len(made) / 1e6:.1f} MB)")


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    guard(app)


if __name__ == "__main__":
    main()
