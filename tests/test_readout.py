"""Margins, recovery and the gate on numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from kvnotes import readout
from kvnotes.readout import Margins
from tests.test_prompts import tokens


def unedited(base: float, target: float) -> Margins:
    return Margins(base=base, target=target, base_argmax=True, target_argmax=True)


def test_margin_is_target_minus_base():
    pair = replace(tokens(), base_action=1, target_action=3)
    assert float(readout.margin(torch.tensor([0.0, 2.0, 9.0, 5.0]), pair)) == 3.0
    assert readout.margin(torch.zeros(2, 5), pair).shape == (2,)
    half = torch.tensor([0.0, 2.0, 0.0, 2.01], dtype=torch.bfloat16)
    assert readout.margin(half, pair).dtype == torch.float32


def test_recovery_and_what_it_means():
    arms = unedited(-2.0, 6.0)
    assert readout.recovery(-2.0, arms, floor=0.0) == 0.0  # acts like base
    assert readout.recovery(6.0, arms, floor=0.0) == 1.0  # acts like target
    assert readout.recovery(0.0, arms, floor=0.0) == 0.25
    assert readout.recovery(10.0, arms, floor=0.0) == 1.5
    assert readout.recovery(0.0, unedited(1.0, 1.0), floor=0.0) is None
    assert readout.recovery(0.0, unedited(0.0, 0.01), floor=0.02) is None


def test_field_share_and_interaction():
    assert readout.field_share(0.0, 1.0) == 0.0  # all in the notes
    assert readout.field_share(1.0, 0.0) == 1.0  # all in the field
    assert readout.field_share(0.3, 0.7) == pytest.approx(0.3)
    assert readout.interaction(0.3, 0.7) == pytest.approx(0.0)
    assert readout.interaction(0.0, 0.0) == 1.0  # both are needed


@pytest.mark.parametrize(
    ("base", "target", "passes"),
    [
        (-1.0, 1.0, True),
        (-0.5, 0.5, True),
        (-0.4, 0.5, False),
        (0.1, 5.0, False),
        (-5.0, -0.1, False),
        (0.0, 5.0, False),
    ],
)
def test_gate(base, target, passes):
    assert unedited(base, target).passes(1.0) is passes


def test_p_two_is_a_sigmoid_and_never_overflows():
    assert readout.p_two(0.0) == 0.5
    assert readout.p_two(2.0) == pytest.approx(1 / (1 + 2.718281828459045**-2))
    assert readout.p_two(-1000.0) == 0.0
    assert readout.p_two(1000.0) == 1.0


def test_p_full_sums_to_one():
    assert readout.p_full(torch.tensor([1.0, 2.0, 3.0])).sum() == pytest.approx(1.0)
