"""`make tasks`: a sample prompt in colour with its spans, and the unedited model's competence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from kvnotes import models, runner
from kvnotes.config import RunConfig
from kvnotes.instance import Skipped, TokenPair
from kvnotes.sweep import Trial

COLOURS = {
    "field": "bold black on bright_yellow",
    "trigger": "bold black on bright_yellow",
    "rule_value": "cyan",
    "action": "bold magenta",
    "delimiter": "red",
    "filler": "dim",
    "request": "green",
    "text": "default",
    "template": "dim italic",
    "answer_prefix": "blue",
}


def show(config: RunConfig, console: Console) -> None:
    """Print one sample a layout, why pairs were dropped, and competence by layout and scenario."""
    pairs = runner.generate(config)
    model = models.load(config.model, device=config.device, dtype=config.dtype)
    tokenised = runner.tokenise(model, pairs, query=config.query)
    usable = [one for one in tokenised if isinstance(one, TokenPair)]
    for layout, group in groupby(usable, key=lambda one: one.pair.layout):
        console.print(Text(f"\n{layout}", style="bold underline"))
        console.print(sample(next(group), model.tokenizer))
    console.print(legend())
    trials = [Trial.run(model, pair, engine=config.engine, budget=config.budget) for pair in track(usable, "unedited model", console=console)]
    console.print(dropped([one for one in tokenised if isinstance(one, Skipped)]))
    console.print(competence(trials, config))


def sample(pair: TokenPair, tokenizer: object) -> Text:
    """The base prompt, token by token, in the colour of its span; the query block is underlined."""
    text = Text()
    for at, (token, slot) in enumerate(zip(pair.base_ids, pair.slots, strict=True)):
        style = COLOURS[slot.span.split(".")[0]] + (" underline" if at in pair.query else "")
        text.append(tokenizer.decode([token]), style=style)  # pyright: ignore[reportAttributeAccessIssue]
    return text.append(f"   -> {pair.pair.base.action} (target: {pair.pair.target.action})", style="bold")


def legend() -> Text:
    """The spans' names in their colours."""
    text = Text()
    for name, style in COLOURS.items():
        text.append(name, style=style).append("  ")
    return text


def dropped(skipped: Sequence[Skipped]) -> Table:
    """How many pairs the tokenizer cannot carry, by reason."""
    table = Table("dropped because", "pairs", title=f"{len(skipped)} pairs dropped")
    for reason in sorted({one.reason for one in skipped}):
        table.add_row(reason, str(sum(one.reason == reason for one in skipped)))
    return table


def competence(trials: Sequence[Trial], config: RunConfig) -> Table:
    """Pairs that pass the gate, arms right by the two actions and over the whole vocabulary, by layout and scenario.

    In a polarity design every pair's two arms are two cells of its 2x2, and its group's other pair the other two.
    """
    table = Table(
        "layout", "scenario", "pairs", "pass the gate", "base right", "target right", "argmax right", "mean gap"
    )
    for layout in dict.fromkeys(trial.pair.pair.layout for trial in trials):
        rows = [trial for trial in trials if trial.pair.pair.layout == layout]
        for scenario in sorted({trial.pair.pair.scenario for trial in rows}):
            _row(table, layout, scenario, [t for t in rows if t.pair.pair.scenario == scenario], config)
        _row(table, layout, "all", rows, config, style="bold")
        table.add_section()
    return table


def _row(
    table: Table, layout: str, scenario: str, trials: Sequence[Trial], config: RunConfig, style: str | None = None
) -> None:
    arms = [trial.unedited for trial in trials]
    table.add_row(
        layout,
        scenario,
        str(len(arms)),
        str(sum(arm.passes(config.gate_gap) for arm in arms)),
        str(sum(arm.base < 0 for arm in arms)),
        str(sum(arm.target > 0 for arm in arms)),
        f"{sum(arm.base_argmax + arm.target_argmax for arm in arms)} of {2 * len(arms)}",
        f"{sum(arm.gap for arm in arms) / len(arms):.2f}",
        style=style,
    )
