"""A memory budget bounds what a sweep holds: measured, with edits of most of a long prompt."""

from dataclasses import replace

import pytest
import torch

from bench.measure import MemoryWatch
from kvnotes import memory, models
from kvnotes.instance import Slot, TokenPair
from kvnotes.interventions import CacheEdit, Direction
from kvnotes.sweep import Trial
from tests import tiny
from tests.test_prompts import tokens

LENGTH, MEGABYTE = 960, 10**6


def long_pair(query: int) -> TokenPair:
    """The short pair followed by words at random."""
    pair, extra = tokens(), LENGTH - len(tokens().base_ids)
    draw = torch.Generator().manual_seed(0)
    rest = tuple(torch.randint(3, 20, (extra,), generator=draw).tolist())
    return replace(
        pair,
        base_ids=pair.base_ids + rest,
        target_ids=pair.target_ids + rest,
        slots=pair.slots + tuple(Slot(span="filler", index=i) for i in range(extra)),
        query=tuple(range(LENGTH - query, LENGTH)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("query", [1, 3])
def test_wide_edits_stay_within_the_budget(query, tmp_path):
    """Seven query heads a KV head, and 60 rows that edit nearly every cell: 2.4 MB of cells a row."""
    folder = tiny.checkpoint(
        "qwen2", tmp_path, heads=14, kv_heads=2, head_dim=64, num_hidden_layers=2, max_position_embeddings=1024
    )
    model = models.load(str(folder), device="cpu", dtype="float32")
    budget = 32 * MEGABYTE
    trial = Trial.run(model, long_pair(query), engine="rows", budget=budget)
    notes = trial.pair.downstream
    edits = [CacheEdit(name=str(i), positions=notes[i:], into="base", donor="target") for i in range(60)]
    trial.margins(edits[:1])
    with MemoryWatch(torch.device("cpu")) as watch:
        trial.margins(edits)
    assert watch.peak is not None
    assert watch.peak < budget + 40 * MEGABYTE  # a block's scores, and what the allocator keeps
    assert len(trial.echoes) > 4  # it was cut into several forwards


def test_a_row_is_charged_for_its_tokens_cells_and_logits(tmp_path):
    """By hand: 32 wide, 48 inner, 4 heads of 8: (4 x 32 + 2 x 32 + 3 x 48) x 4 bytes a token; a cell of a KV head takes
    four vectors of 8 numbers and 48 bytes of places; a logit 4 bytes."""
    from kvnotes.cache import Cells
    from kvnotes.rows import Edit, Row

    model = models.load(str(tiny.checkpoint("qwen2", tmp_path)), device="cpu", dtype="float32")
    edited = Row(edits=(Edit(cells=Cells(positions=(3, 4, 5)), donor=None),))
    assert memory.row(model, tokens=2, row=Row(), cells=9, read=0) == 2 * 336 * 4
    assert memory.row(model, tokens=1, row=edited, cells=9, read=7) == 336 * 4 + 6 * (8 * 4 * 4 + 48) + 28


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_directions_in_half_precision(dtype):
    """Projecting (3, 4) on the first axis of a plane turned by nothing: the component is the donor's, to rounding."""
    own, donor = torch.tensor([3.0, 4.0, 5.0], dtype=dtype), torch.tensor([7.0, 8.0, 9.0], dtype=dtype)
    made = Direction(torch.tensor([[2.0, 0.0, 0.0]]))(own, donor)
    assert made.dtype == dtype
    assert made.tolist() == [7.0, 4.0, 5.0]
    assert Direction(torch.tensor([[2.0, 0.0, 0.0]]))(own, None).tolist() == [0.0, 4.0, 5.0]


def test_a_zero_direction_changes_nothing():
    """Alone it leaves (3, 4, 5) as it is, with a donor and without; beside the second axis it adds nothing to it."""
    own, donor = torch.tensor([3.0, 4.0, 5.0]), torch.tensor([7.0, 8.0, 9.0])
    zero = Direction(torch.zeros(2, 3))
    assert zero(own, donor).tolist() == zero(own, None).tolist() == [3.0, 4.0, 5.0]
    beside = Direction(torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
    assert beside(own, donor).tolist() == [3.0, 8.0, 5.0]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([], []),
        ([3, 3], [(0, 2)]),
        ([3, 3, 3, 3, 3], [(0, 3), (3, 5)]),  # 15 of 10: two batches of 9 and 6, not of 9, 6 and a rest
        ([1] * 11, [(0, 6), (6, 11)]),  # not 10 and 1
        ([30, 1, 1], [(0, 1), (1, 3)]),  # one that is too large alone runs alone
        ([6, 6, 6], [(0, 1), (1, 2), (2, 3)]),  # no two fit
    ],
)
def test_batches_are_few_and_even(costs, expected):
    assert [(part.start, part.stop) for part in memory.batches(costs, 10)] == expected
