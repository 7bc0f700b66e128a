"""Rotary pairs found from keys, and the mean of a page in closed form."""

import pytest
import torch

from kvslim.transforms.rope import Rope, find_rope

FREQUENCIES = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
HALVES = torch.stack((torch.arange(16), torch.arange(16) + 16))
NEIGHBOURS = torch.stack((torch.arange(0, 32, 2), torch.arange(1, 32, 2)))
PART = torch.stack((torch.arange(8), torch.arange(8) + 8))


def keys(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shifted(rope: Rope, plain: torch.Tensor, shift: int) -> torch.Tensor:
    return rope.turn(plain, torch.arange(plain.shape[1]) + shift).float()


@pytest.mark.parametrize("pairs", [HALVES, NEIGHBOURS, PART], ids=["halves", "neighbours", "part"])
def test_pairs_and_frequencies_are_found(pairs):
    rope = Rope(pairs, FREQUENCIES[: pairs.shape[1]])
    plain = keys()
    found = find_rope(shifted(rope, plain, 0), shifted(rope, plain, 1), shifted(rope, plain, 1024), 1024)
    assert found is not None
    torch.testing.assert_close(found.frequency[: pairs.shape[1]], rope.frequency, rtol=0, atol=1e-8)
    positions = torch.tensor([0, 5, 30000])
    far = found.turn(plain[:, :3], positions)
    torch.testing.assert_close(far, rope.turn(plain[:, :3], positions), rtol=0, atol=2e-3)


def test_keys_that_do_not_turn_by_position_are_not_understood():
    plain = keys().float()
    assert find_rope(plain, plain * 1.1, plain * 1.2, 1024) is None


def test_turning_back_undoes_a_turn():
    rope, plain = Rope(HALVES, FREQUENCIES), keys()
    positions = torch.arange(40) + 7
    torch.testing.assert_close(rope.turn(rope.turn(plain, positions), -positions), plain)


@pytest.mark.parametrize("start", [0, 3, 20000])
def test_page_mean_is_the_mean_over_its_positions(start):
    rope = Rope(HALVES, FREQUENCIES)
    mean = keys()[:, 0]
    each = rope.turn(mean[:, None].expand(-1, 64, -1), torch.arange(64) + start)
    found = rope.mean_turn(mean, torch.tensor([start, start + 64]), 64)
    assert found.shape == (2, 2, 32)
    torch.testing.assert_close(found[0], each.mean(1), rtol=0, atol=1e-10)


def test_a_pair_that_stands_still_keeps_its_mean():
    rope = Rope(HALVES, torch.zeros(16, dtype=torch.float64))
    mean = keys()[:, 0]
    torch.testing.assert_close(rope.mean_turn(mean, torch.tensor([1000]), 64)[0], mean)
