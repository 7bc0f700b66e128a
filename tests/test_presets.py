"""Every preset: its bits, its golden bytes, the same bytes however the prompt was cut, and what it does to keys."""

import hashlib
import json
import warnings
from pathlib import Path

import pytest
import torch

from kvslim.attention.reference import Score
from kvslim.cache import LayerCache
from kvslim.codecs.side import Frozen, SidePacker, compact
from kvslim.errors import PackingWarning
from kvslim.layout import bits_per_value
from kvslim.presets import DEFAULT_RECIPE, PRESETS, pair
from kvslim.recipe import Recipe
from kvslim.store.table import BlockAllocator, BlockTable
from kvslim.transforms.balance import Balance, Balanced
from kvslim.transforms.base import Chain, Fitted, Sample, Transform
from kvslim.transforms.center import Center, PageMean
from kvslim.transforms.rope import Rope

GOLDEN = Path(__file__).parent / "golden" / "presets.json"
D = 64

# bits per value of K and V together, all parts of a block, by the formulas of docs/recipes
BITS = {
    "none": (16, 16, 16),
    "slim4": (4 + 0.5 * 16 / 128 + 16 / 64, 4 + 0.5 * 16 / 128 + 16 / 128, 4 + 0.5 * 16 / 128 + 16 / 256),
    "slim3": (3.3125, 3.1875, 3.125),
    "slim2": (2.3125, 2.1875, 2.125),
    "slim4p": (4.25, 4.125, 4.0625),
    "slim3p": (3.25, 3.125, 3.0625),
    "k4v2": (3.3125, 3.1875, 3.125),
    "int8": (8 + 16 / (128 * 64), 8 + 16 / (128 * 128), 8 + 16 / (128 * 256)),
    "int4": (4 + 16 / (128 * 64), 4 + 16 / (128 * 128), 4 + 16 / (128 * 256)),
    "kivi4": (5, 5, 5),
    "kivi2": (3, 3, 3),
    "log4": (4.3125, 4.1875, 4.125),
    "nf4": (4.25, 4.25, 4.25),
    "turbo4": (4.25, 4.125, 4.0625),
    "turbo3": (3.25, 3.125, 3.0625),
    "turbo2": (2.25, 2.125, 2.0625),
    "turbo4-qjl": (4.375, 4.1875, 4.09375),
    "turbo3.5": (4.0, 3.5, 3.25),
    "ultra4": (4.25, 4.25, 4.25),
    "ultrafp4": (4.25, 4.25, 4.25),
    "nvfp4": (4.5, 4.5, 4.5),
    "kvarn4": (4.625, 4.375, 4.25),
    "fp8": (8.25, 8.125, 8.0625),
}


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    """Roughly normal numbers from a linear congruential generator: the same on every machine and torch version."""
    count, state, values = torch.Size(shape).numel(), seed, []
    for _ in range(count):
        total = 0
        for _ in range(4):
            state = (state * 1103515245 + 12345) % 2**31
            total += state >> 16
        values.append((total - 2 * 2**15) / 2**14)
    return torch.tensor(values, dtype=torch.float32).view(shape)


def prior() -> dict[str, torch.Tensor]:
    return {
        "query_moment": torch.eye(D).repeat(2, 1, 1) + 0.25,
        "key_power": torch.ones(2, D),
        "key_mean": torch.ones(2, D),
        "random_mean": torch.ones(2, D),
        "plain_mean": torch.ones(2, D),
        "rope_pairs": torch.stack((torch.arange(D // 2), torch.arange(D // 2) + D // 2)),
        "rope_frequency": torch.linspace(1, 0, D // 2).double(),
    }


def cache_of(recipe: str) -> LayerCache:
    parsed = Recipe.parse(recipe)
    return LayerCache(parsed, 0, BlockTable(BlockAllocator(), parsed.block), prior)


def feed(cache: LayerCache, keys: torch.Tensor, queries: torch.Tensor, cuts: list[int], frozen: object = None) -> None:
    start, values = 0, noise(*keys.shape, seed=9)
    for size in cuts:
        k, v, q = (states[:, :, start : start + size] for states in (keys, values, queries))
        cache.append(k, v)
        if frozen is not None:
            cache.store.rows[0].frozen = frozen
        cache.attend(q, None, Score(D**-0.5))
        start += size


@pytest.mark.parametrize("name", PRESETS)
def test_bits_per_value_follow_the_formula(name):
    recipe = Recipe.parse(name)
    for head_dim, wanted in zip((64, 128, 256), BITS[name], strict=True):
        sides = [SidePacker(side, head_dim, recipe.block, "fp16") for side in (recipe.key, recipe.value)]
        found = sum(bits_per_value(side.layout) for side in sides) / 2
        assert found == pytest.approx(wanted, rel=0.01)


def fixed(transform: Transform) -> Fitted:
    """A fitted transform whose parameters do not hang on the last bit of a logarithm."""
    if isinstance(transform, Balance):
        return Balanced(torch.tensor([0.5, 1.0, 2.0, 4.0]).repeat(2, D // 4))
    if isinstance(transform, Center):  # standing pairs: no sines either
        still = torch.zeros(D // 2, dtype=torch.float64)
        return PageMean(torch.ones(2, D), Rope(prior()["rope_pairs"], still), 64)
    return transform.fit(Sample(noise(2, 64, D, seed=3)))


@pytest.mark.parametrize("name", PRESETS)
def test_golden_bytes(name):
    """Bytes that are on somebody's disk must stay readable: a change here is a new format version."""
    recipe, digest = Recipe.parse(name), hashlib.sha256()
    x = noise(2, 2, recipe.block, D) * torch.tensor([1.0, 3.0, 0.25, 1.0]).repeat(D // 4) + 2
    for side in (recipe.key, recipe.value):
        packer = SidePacker(side, D, recipe.block, "fp16")
        chain = Chain(tuple(fixed(transform) for transform in packer.transforms))
        moment = compact(prior()["query_moment"]) if packer.codec.needs_queries else None
        packed = packer.encode(x, Frozen(chain, packer.codec.table(), moment), torch.tensor([0, recipe.block]))
        for part in packed.layout.parts:
            digest.update(packed.parts[part.name].contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", [*PRESETS, "k=equalize:4:window=3+v=equalize:4:predict+block=32"])
def test_bytes_do_not_depend_on_how_the_prompt_was_cut(name):
    tokens = 100 if Recipe.parse(name).immediate else 300
    keys, queries = noise(1, 2, tokens, D, seed=5) + 1, noise(1, 4, tokens, D, seed=6)
    whole = cache_of(name)
    feed(whole, keys, queries, [tokens])
    frozen = whole.store.rows[0].frozen
    for cuts in ([tokens // 4] * 4, [1] * tokens):
        other = cache_of(name)
        feed(other, keys, queries, cuts, frozen)
        assert other.store.rows[0].packed == whole.store.rows[0].packed > 0
        entries = whole.store.view(0).entries
        for side in "kv":
            a, b = (cache.store.pool.read(side, [entry.block for entry in entries]) for cache in (whole, other))
            for part, tensor in a.parts.items():
                assert torch.equal(tensor, b.parts[part]), (side, part, cuts[0])


@pytest.mark.parametrize("name", ["slim4", "slim3", "slim2", "kivi4", "kivi2", "k8v4", "ultra4", "log4"])
def test_a_constant_added_to_all_keys_costs_nothing(name):
    """Codes near a tie may fall the other way, since the mean is rounded; the error must not grow."""
    keys, queries = noise(1, 2, 400, D, seed=5), noise(1, 4, 400, D, seed=6)
    probe = noise(1, 4, 16, D, seed=7)
    errors = []
    for shift in (torch.zeros(D), noise(D, seed=8) * 40):
        outs = []
        # fp16 would round keys that the constant makes large; fp32 leaves the codec alone to be judged
        for recipe in (f"{name}+exact=fp32", "none"):
            cache = cache_of(recipe)
            feed(cache, keys + shift, queries, [384])
            cache.append(keys[:, :, 384:] + shift, noise(1, 2, 16, D, seed=10))
            outs.append(cache.attend(probe, None, Score(D**-0.5)))
        errors.append(float((outs[0] - outs[1]).norm()))
    assert errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize("name", ["turbo4", "nvfp4", "kvarn4"])
def test_a_fragile_preset_warns_once_on_keys_with_a_large_mean(name):
    keys, queries = noise(1, 2, 300, D) + 20, noise(1, 4, 300, D)
    with pytest.warns(PackingWarning, match="use slim4") as seen:
        feed(cache_of(f"{name}+recent=0"), keys, queries, [150] * 2)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackingWarning)
        feed(cache_of("slim4"), keys, queries, [300])
        feed(cache_of(name), keys - 20, queries, [300])


def test_every_preset_says_where_it_comes_from_and_was_measured():
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert preset.summary and preset.source and preset.figures, name
        assert not preset.fragile or "use slim4" in preset.note, name


def test_the_default_is_slim4_and_pairs_are_slim_sides():
    assert DEFAULT_RECIPE == "slim4"
    assert pair("k4v4") + "+block=128+sinks=4+recent=32" == str(Recipe.parse("slim4"))
    assert pair("k9v4") is None
