"""KVState on hand-made tensors."""

import math

import pytest
import torch

from kvnotes.cache import CacheError, Cells, KVState, Rotation, stack


def state(value: float, *, positions=(0, 1, 2), layers=2, heads=2) -> KVState:
    """Every cell holds value + 100 layer + 10 head + position, keys as they are and values negated."""
    grid = torch.tensor([[[h * 10.0 + p] for p in range(len(positions))] for h in range(heads)]) + value
    made = tuple({"k": grid + 100 * i, "v": -(grid + 100 * i)} for i in range(layers))
    return KVState(made, torch.tensor([list(positions)]))


def test_replace_touches_the_named_cells_and_no_others():
    old, new = state(0.0), state(0.5)
    edited = old.replace(Cells(positions=(2,), layers=(1,), kv_heads=(0,)), new)
    assert edited.layers[1]["k"][0, 2, 0] == 102.5
    assert edited.layers[1]["v"][0, 2, 0] == -102.5
    differs = [
        (i, h, p)
        for i in range(2)
        for h in range(2)
        for p in range(3)
        if edited.layers[i]["k"][h, p, 0] != old.layers[i]["k"][h, p, 0]
    ]
    assert differs == [(1, 0, 2)]
    assert old.layers[1]["k"][0, 2, 0] == 102.0  # the old state is as it was


def test_zeroing_and_counting():
    cells = Cells(positions=(0, 2))
    assert cells.count(state(1.0)) == 2 * 2 * 2  # two layers, two heads, two positions
    zeroed = state(1.0).replace(cells, None)
    assert zeroed.layers[0]["k"][:, [0, 2]].abs().sum() == 0
    assert torch.equal(zeroed.layers[0]["k"][:, 1], state(1.0).layers[0]["k"][:, 1])


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (Cells(positions=()), "names no cell"),
        (Cells(positions=(3,)), "within 0..2"),
        (Cells(positions=(-1,)), "within 0..2"),
        (Cells(positions=(1, 1)), "distinct"),
        (Cells(positions=(0,), layers=(2,)), "layers"),
        (Cells(positions=(0,), kv_heads=(2,)), "kv_heads"),
    ],
)
def test_edits_that_cannot_be_made(cells, message):
    with pytest.raises(CacheError, match=message):
        state(0.0).replace(cells, state(1.0))


def test_a_donor_at_other_positions_is_refused():
    with pytest.raises(CacheError, match="different positions"):
        state(0.0).replace(Cells(positions=(0,)), state(0.0, positions=(1, 2, 3)))
    with pytest.raises(CacheError, match="same positions"):
        stack([state(0.0), state(0.0, positions=(1, 2, 3))])


def test_a_donor_of_another_model_is_refused():
    with pytest.raises(CacheError, match="different shapes"):
        state(0.0).replace(Cells(positions=(0,)), state(0.0, layers=3))
    with pytest.raises(CacheError, match="different shapes"):
        state(0.0).replace(Cells(positions=(0,)), state(0.0, heads=1))


def test_slice_crop_splice_keep_positions():
    both = state(0.0).crop(2).splice(state(0.5, positions=(7, 8, 9)).slice(1, 3))
    assert both.positions.tolist() == [[0, 1, 8, 9]]
    assert both.layers[0]["k"][0, :, 0].tolist() == [0.0, 1.0, 1.5, 2.5]


def test_fingerprint_sees_every_bit_and_the_positions():
    one = state(0.0)
    assert one.fingerprint() == state(0.0).fingerprint()
    assert one.fingerprint() != state(1e-6).fingerprint()
    assert one.fingerprint() != state(0.0, positions=(0, 1, 3)).fingerprint()


def test_a_quarter_turn():
    """One pair at frequency pi/2 a position: (1, 0) moved by one position becomes (0, 1), by two (-1, 0)."""
    k = torch.tensor([[[1.0, 0.0, 5.0]]])  # the third dimension is not rotated
    rotation = Rotation((torch.tensor([math.pi / 2]),))
    start = KVState(({"k": k, "v": k},), torch.tensor([[4]]))
    one, two = start.shift(1, rotation), start.shift(2, rotation)
    torch.testing.assert_close(one.layers[0]["k"], torch.tensor([[[0.0, 1.0, 5.0]]]))
    torch.testing.assert_close(two.layers[0]["k"], torch.tensor([[[-1.0, 0.0, 5.0]]]))
    assert torch.equal(one.layers[0]["v"], k)
    assert one.positions.tolist() == [[5]]
    with pytest.raises(CacheError, match="before position 0"):
        start.shift(-5, rotation)


def test_deviation_is_the_largest_difference_in_the_range():
    edited = state(0.0).replace(Cells(positions=(2,), layers=(0,)), state(0.25))
    assert edited.deviation(state(0.0), start=0, stop=2) == 0.0
    assert edited.deviation(state(0.0), start=0, stop=3) == 0.25
