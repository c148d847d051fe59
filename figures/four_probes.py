"""The paper's figure 3 by model: locality, suffix concentration, where the decision is read, what a correction says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from figures import composed, side
from figures.composed import Page
from figures.side import Counts, Curve, Measure, Models, Said

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATES = (
    Measure(study="locality", effect="field_only", label="field-only"),
    Measure(study="locality", effect="notes_only", label="notes-only"),
    Measure(study="locality", effect="full_downstream", label="full-downstream\n(identity)"),
)
# the paper gives no numbers for its panel b; what it says of its eight best was ranked on the tested pair itself
SUFFIX = Counts(
    study="suffix",
    of="positions",
    ks=(1, 2, 4, 8, 16, 32, 64),
    curves=(
        Curve(effects="top_{k}", words="best k, by other scenarios", line="-"),
        Curve(effects="in_sample_{k}", words="best k, by the pair itself", line="--", paper="specificity.top_{k}"),
        Curve(
            effects="random_{k}", words="k at random (control)", line=":", marker="s", paper="specificity.random_{k}"
        ),
    ),
)
DEPTH = Measure(study="suffix", effect="depth_centroid", label="centroid of the notes' effect over depth")
SHARES = (
    Measure(study="locality", effect="field_share", label="the field's share"),
    Measure(study="locality", effect="field_share", label="the notes' share", rest=True, paper="none"),
    Measure(study="locality", effect="interaction", label="interaction"),
)
WORDINGS = {
    "bare_value": "bare value",
    "tagged_update": "tagged update",
    "explicit_override": "explicit override",
    "state_update": "state update",
    "reevaluate": "disregard and\nre-evaluate",
    "old_value": "state update, old\nvalue (control)",
    "uncorrected": "no correction\n(control)",
    "target": "target run, no\ncorrection (control)",
}
WORDING = tuple(
    Measure(study="wording", effect=f"p_two_{name}", label=label, paper=f"wording.p_safe.{name}")
    for name, label in WORDINGS.items()
)


def panel_suffix(ax: Axes, models: Models) -> Said:
    """Recovery by the number of positions; in words, how deep the notes' effect lies."""
    from figures import style

    said = side.panel_counts(ax, models, SUFFIX)
    for index, (model, found) in enumerate(models.items()):
        depth = side.cell(DEPTH, found)
        if depth.value is not None:
            said += side.words(f"{model}: {DEPTH.label} {depth.numbers}", style.model_look(index)[0])
    return said


PAGES = (
    Page(
        name="fig3",
        heading="Four causal probes by model (the paper's figure 3)",
        panels={
            "a": composed.rows("locality: recovery by cache state", STATES),
            "b": composed.lines("suffix concentration: best positions first", SUFFIX, panel_suffix, said=(DEPTH,)),
            "c": composed.rows(
                "where the decision is read from", SHARES, xlabel="share of the decision  (0: none, 1: all)"
            ),
            "d": composed.rows(
                "what a correction must say", WORDING, xlabel="probability of the right action, of the two"
            ),
        },
        notes=(
            "b: the paper gives no numbers; its eight best (in-sample) and eight random positions stand at 8. c: the "
            "field's share is (R(field-only) + 1 \N{MINUS SIGN} R(notes-only)) / 2, the notes' the rest; the paper's "
            "bound is of no named model. d: the paper's P(safe), where the right action is always the safe one.",
        ),
    ),
)
