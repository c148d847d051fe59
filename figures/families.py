"""The paper's table 3 (five probes by model) and table 4 (dissociation and specificity) as pages of several models."""

from __future__ import annotations

from figures import composed
from figures.composed import Page
from figures.side import Counts, Curve, Measure

TABLE3 = (
    Measure(study="locality", effect="field_only", label="field-only"),
    Measure(study="locality", effect="full_downstream", label="full-downstream (identity)"),
    Measure(study="dissociation", effect="trigger_only", label="dissociation: trigger"),
    Measure(study="dissociation", effect="notes", label="dissociation: notes"),
    Measure(study="dissociation", effect="same_conclusion", label="same conclusion's notes (control)"),
    Measure(study="specificity", effect="top_8", label="best 8 notes, by other scenarios", paper="none"),
    Measure(study="specificity", effect="in_sample_8", label="best 8, by the pair itself", paper="top_8"),
    Measure(study="specificity", effect="random_8", label="8 random others (control)"),
    Measure(study="injection", effect="full_notes", label="injection: all notes"),
    Measure(study="injection", effect="follow_rate", label="injection: follow rate"),
    Measure(study="timing", effect="write_depth", label="write depth / layers", depth=True),
    Measure(study="timing", effect="commit_depth", label="commit depth / layers", depth=True),
)
CONTROLS = TABLE3[2:5]
BEST = Counts(
    study="specificity",
    of="notes transplanted",
    ks=(1, 2, 4, 8, 16),
    curves=(
        Curve(effects="top_{k}", words="best k, by other scenarios", line="-"),
        Curve(effects="in_sample_{k}", words="best k, by the pair itself", line="--", paper="top_{k}"),
        Curve(effects="random_{k}", words="k at random (control)", line=":", marker="s", paper="random_{k}"),
    ),
)
DEPTHS = "A depth is (l + 1) / L for the layer l, from 0, after which something holds, of L layers."
PAGES = (
    Page(
        name="table3",
        heading="Five probes by model (the paper's table 3)",
        panels={
            "": composed.rows(
                "five probes", TABLE3, xlabel="recovery, share of pairs, or depth as a share of the layers"
            )
        },
        notes=(DEPTHS,),
    ),
    Page(
        name="table4",
        heading="Controls by model (the paper's table 4)",
        panels={
            "dissociation": composed.rows("dissociation, the field held identical", CONTROLS),
            "specificity": composed.lines("specificity: best k against k random notes", BEST),
        },
        notes=("The paper's best eight were ranked on the pair that they are tested on.",),
    ),
)
