"""A study's flags, made from its settings: every setting is a flag, every flag a setting. No torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvnotes import config as configs
from kvnotes.config import RunConfig
from kvnotes.errors import KVNotesError

INTERRUPTED = 130  # the shell's code for Ctrl-C


def run(settings: type[RunConfig], *, study: str, title: str, action: Callable[[RunConfig], Any]) -> None:
    """Parse the command line into the study's settings and act; known failures are one line and exit code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command(settings, study=study, title=title, action=action))
    guard(app)


def command(
    settings: type[RunConfig],
    *,
    study: str,
    title: str,
    action: Callable[[RunConfig], Any],
    without: frozenset[str] = frozenset(),
) -> Callable[..., None]:
    """A function whose keywords are the settings, each a flag with its description and default.

    `without` names settings that the action does not use, and that are therefore no flags of it.
    """

    def act(**flags: Any) -> None:
        action(configs.make(settings, study=study, flags=flags))

    act.__doc__ = (
        f"{title}.\n\nDefaults are those of configs/default.yaml, then configs/{study}.yaml where there is one."
    )
    act.__signature__ = _signature(settings, study, without)  # pyright: ignore[reportFunctionMemberAccess]
    return act


def guard(app: Callable[[], Any]) -> None:
    """Run a command line; a known failure is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    try:
        app()
    except KVNotesError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        typer.echo(f"error: {error.name} is not installed: this needs the models extra, `make setup`", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"error: {error.strerror or error}: {error.filename or 'the output'}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _signature(settings: type[RunConfig], study: str, without: frozenset[str]) -> inspect.Signature:
    try:
        usual = configs.defaults(study)
    except KVNotesError:  # a broken config file is told by the command that needs it, not by every other one
        usual = {}
    return inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(info, usual.get(name))
            )
            for name, info in settings.model_fields.items()
            if name not in without | {"study"}
        ]
    )


def _option(info: Any, usual: Any) -> Any:
    kind = info.annotation if info.annotation in (int, float, Path) else str
    return Annotated[kind | None, typer.Option(help=f"{info.description} (default: {usual})")]
