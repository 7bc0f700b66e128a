"""equalize with statistics of earlier blocks: what they are drawn from, and that no cut, crop or batch changes the bytes."""

import pytest
import torch

from kvslim.attention.reference import Score
from kvslim.cache import LayerCache
from kvslim.codecs.decode import decode
from kvslim.codecs.side import Frozen, SidePacker
from kvslim.errors import RecipeError
from kvslim.layout import PackedBlock
from kvslim.recipe import Recipe, Side
from kvslim.store.table import BlockAllocator, BlockTable
from kvslim.transforms.base import Chain

D, P = 32, 16
RECIPE = "k=equalize:4:window=3+v=equalize:4:predict+block=16+sinks=4+recent=0+exact=fp32"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values whose mean and deviation drift from token to token and differ between channels."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    drift = torch.linspace(-1, 2, shape[-2])[:, None] * torch.linspace(0, 3, shape[-1])
    return x * torch.linspace(0.5, 2, shape[-1]) + drift


def packer_of(side: str) -> SidePacker:
    return SidePacker(Side.parse(side), D, P, "fp32")


def frozen_of(packer: SidePacker) -> Frozen:
    return Frozen(Chain(()), packer.codec.table())


def one(packed: PackedBlock, index: int) -> PackedBlock:
    return PackedBlock(packed.layout, {name: part[index : index + 1] for name, part in packed.parts.items()})


@pytest.mark.parametrize(
    ("side", "drawn_from"),
    [
        ("equalize:4:window=3", lambda blocks, i: [*range(max(0, i - 2), i), "own"]),
        ("equalize:4:predict", lambda blocks, i: [i - 1] if i else ["own"]),
        ("equalize:4:predict:window=2", lambda blocks, i: list(range(max(0, i - 2), i)) or ["own"]),
    ],
)
def test_statistics_are_drawn_from_what_the_blocks_before_decode_to(side, drawn_from):
    packer, x = packer_of(side), normal(4, 2, P, D)
    frozen = frozen_of(packer)
    packed = packer.encode(x, frozen)
    values = decode(packed, frozen.table)
    for block in range(4):
        sample = [x[block] if which == "own" else values[which] for which in drawn_from(values, block)]
        mean = torch.cat(sample, dim=1).mean(1)
        torch.testing.assert_close(packed.parts["offset"][block].float(), mean, rtol=1e-3, atol=1e-3)
    assert (values - x).square().mean() < 0.05 * x.var()


def test_a_window_of_one_is_the_plain_form():
    x = normal(3, 2, P, D)
    plain, windowed = packer_of("equalize:4"), packer_of("equalize:4:window=1")
    for name, part in plain.encode(x, frozen_of(plain)).parts.items():
        assert torch.equal(part, windowed.encode(x, frozen_of(windowed)).parts[name])


def test_blocks_encoded_one_by_one_are_those_encoded_together():
    packer, x = packer_of("equalize:4:window=3"), normal(5, 2, P, D)
    frozen = frozen_of(packer)
    whole = packer.encode(x, frozen)
    for block in range(5):
        earlier = [(one(whole, i), P) for i in range(max(0, block - 2), block)]
        alone = packer.encode(x[block : block + 1], frozen, None, earlier)
        for name, part in alone.parts.items():
            assert torch.equal(part[0], whole.parts[name][block]), (block, name)


def test_after_a_crop_inside_a_block_only_its_valid_tokens_count():
    keys, values = normal(1, 2, 100, D), normal(1, 2, 100, D, seed=1)
    parsed = Recipe.parse(RECIPE)
    cache = LayerCache(parsed, 0, BlockTable(BlockAllocator(), P))

    def feed(start: int, stop: int) -> None:
        cache.append(keys[:, :, start:stop], values[:, :, start:stop])
        cache.attend(keys[:, :, start:stop], None, Score(D**-0.5))

    feed(0, 4 + 2 * P)
    cache.table.crop(0, P + 5)
    cache.crop(4 + P + 5)
    feed(4 + P + 5, 4 + 2 * P + 5)
    entries = cache.store.view(0).entries
    assert [entry.valid for entry in entries] == [P, 5, P]
    for side, x, index in (("k", keys, 0), ("v", values, 1)):
        packer, frozen = cache.store.packers[index], cache.store.rows[0].frozen[index]
        earlier = [(cache.store.pool.read(side, [entry.block]), entry.valid) for entry in entries[:2]]
        want = packer.encode(x[:, :, 4 + P + 5 : 4 + 2 * P + 5], frozen, None, earlier)
        for name, part in cache.store.pool.read(side, [entries[2].block]).parts.items():
            assert torch.equal(part, want.parts[name]), (side, name)
        whole = packer.encode(x[:, :, 4 + P + 5 : 4 + 2 * P + 5], frozen, None, [(block, P) for block, _ in earlier])
        assert not torch.equal(want.parts["offset"], whole.parts["offset"])


def test_an_unknown_window_is_refused():
    with pytest.raises(RecipeError, match="use one of 1, 2, 3, 4, 5, 6, 7, 8"):
        packer_of("equalize:4:window=9")
