"""The attention kernels under triton's interpreter: the reference's output, for every layout that a preset has."""

from dataclasses import dataclass

import pytest
import torch

from dense_model import Geometry, Single
from kvslim.attention import dispatch, reference
from kvslim.attention.reference import Score
from kvslim.cache import LayerCache
from kvslim.codecs.side import SidePacker
from kvslim.kernels.triton.form import CodeForm, NoTritonFormError, kernel_table, side_form
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe
from kvslim.store.layer import LayerStore
from kvslim.store.table import BlockAllocator, BlockTable

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

from kvslim.attention.triton import TritonLayer
from kvslim.kernels.triton.tile import values_of

HALF = 2e-3  # of the largest output, where values are multiplied in fp16 or bf16
FULL = 2e-4
CALIBRATED = {"slim4p", "slim3p"}  # their keys need a calibration


def recipe_of(name: str) -> str:
    """A preset, without the page means that only a calibrated model has."""
    text = PRESETS[name].recipe if name in PRESETS else name
    return text.replace("center:kind=page/", "") if name in CALIBRATED else text


def filled(recipe: str, geometry: Geometry, lengths: list[int], batch: int = 1) -> Single:
    """A layer fed chunks of `lengths`, with what no token is in set to NaN."""
    model = Single(recipe_of(recipe), geometry)
    for seed, length in enumerate(lengths):
        model.feed(spread(geometry.chunk(batch, length, seed)))
    poison(model.store)
    return model


def spread(chunk):
    """Channels of different size around means, so that a wrong scale or channel shows."""
    q, k, v = chunk
    size = 1 + torch.arange(k.shape[-1]) % 5 / 4
    return q, k * size + size, v * (1 + torch.arange(v.shape[-1]) % 3) + 0.3


def poison(store: LayerStore) -> None:
    """NaN in exact slots that no token is in; in blocks no sequence holds, and in their unused slots, junk codes and NaN scales."""
    for index, row in enumerate(store.rows):
        for side in (store.key, store.value):
            side[index, :, row.sinks + row.tail :] = torch.nan
    valid = {entry.block: entry.valid for row in store.table.rows for entry in row}
    store.pool.reserve(store.pool.capacity + 1)
    for block in range(store.pool.capacity):
        start = max(at for at in store.pool.starts if at <= block)
        for parts in store.pool.slabs[store.pool.starts.index(start)].values():
            for name, tensor in parts.items():
                unused = tensor[block - start]
                if name in ("code", "token", "zero"):
                    unused = unused[:, valid.get(block, 0) :]
                elif block in valid:
                    continue
                unused.fill_(171 if unused.dtype == torch.uint8 else torch.nan)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as the model hands them over: heads inside tokens, the rows of a wider tensor."""
    batch, heads, tokens, dim = x.shape
    room = torch.full((batch, tokens, heads, dim + 8), torch.nan, dtype=x.dtype)
    room[..., :dim] = x.transpose(1, 2)
    return room[..., :dim].transpose(1, 2)


def assert_like_reference(
    model: Single,
    queries: int,
    *,
    family: str = "hopper",
    multiprocessors: int = 1,
    bound: float = HALF,
    mask: torch.Tensor | None = None,
    score: Score | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    q, k, v = (strided(x.to(dtype)) for x in spread(model.geometry.chunk(len(model.store.rows), queries, 99)))
    score = score or model.geometry.score
    want = reference.attend(q, model.store, (k, v), mask, score).float()
    got = TritonLayer(model.store, family, multiprocessors).attend(q, model.store, (k, v), mask, score).float()
    assert want.isfinite().all()
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= bound, f"{error:.2e}"


@dataclass(frozen=True)
class Case:
    recipe: str
    dim: int
    lengths: tuple[int, ...]
    queries: int
    family: str
    heads: tuple[int, int] = (4, 2)


def cases() -> list[Case]:
    """Every preset, spread over head_dims, lengths, query counts, GQA groups and families."""
    dims, families = (64, 80, 96, 128, 192), ("hopper", "rdna3", "cdna")
    lengths, queries, heads = (268, 300, 290, 395, 280), (1, 3, 1, 17), ((4, 2), (1, 1), (7, 1), (4, 1))
    found = []
    for index, name in enumerate(PRESETS):
        dim = dims[index % 5]
        if name == "kivi4" or name == "kivi2" or name.startswith(("ultrafp4", "nf4")):
            dim = 64 if index % 2 else 96
        if name == "nf4":
            dim = 64
        found.append(
            Case(name, dim, (lengths[index % 5], 33), queries[index % 4], families[index % 3], heads[index % 4])
        )
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.recipe}-{case.dim}")
def test_every_preset(case):
    geometry = Geometry(*case.heads, case.dim, case.dim)
    model = filled(case.recipe, geometry, [*case.lengths])
    assert case.recipe == "none" or model.store.rows[0].packed
    assert_like_reference(model, case.queries, family=case.family, bound=FULL if case.recipe == "none" else HALF)


@pytest.mark.parametrize("length", [1, 63, 100, 127, 128, 129])
def test_lengths_around_a_block(length):
    """From nothing packed over a block that is just full to one with a token after it."""
    model = filled("int8+sinks=0+recent=0", Geometry(2, 1, 64, 64), [length])
    assert model.store.rows[0].packed == length // 128 * 128
    assert_like_reference(model, 1)


def test_a_long_context_in_many_shares():
    """Several slabs, and more shares than some sequence has work for."""
    model = filled("slim4", Geometry(2, 1, 64, 64), [700, 700, 600])
    assert len(model.store.pool.slabs) > 2
    assert_like_reference(model, 1, multiprocessors=8)


@pytest.mark.parametrize(("dim", "recipe", "family"), [(256, "slim4", "rdna3"), (512, "int4", "ampere")])
def test_large_heads(dim, recipe, family):
    """Held in registers, or read again in every step."""
    assert_like_reference(filled(recipe, Geometry(1, 1, dim, dim), [270]), 1, family=family)


def test_keys_and_values_of_different_width():
    assert_like_reference(filled("slim4", Geometry(4, 2, 96, 64), [300]), 3)


@pytest.fixture
def bf16_products(monkeypatch) -> None:
    """The interpreter holds bf16 as integers, and multiplies those; convert them first."""
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (
            interpreter.TensorHandle(
                interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32
            )
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        )
        return plain(self, a, b, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["none", "kivi4"])
def test_dtypes_of_a_model(recipe, dtype):
    geometry = Geometry(4, 2, 64, 64)
    model = Single(recipe, geometry)
    model.feed(tuple(x.to(dtype) for x in spread(geometry.chunk(1, 300, 0))))
    # bf16 weights have eight bits
    assert_like_reference(model, 3, dtype=dtype, bound=8e-3 if dtype == torch.bfloat16 else HALF)


@pytest.mark.parametrize("recipe", ["slim4", "kvarn4", "k=affine:4:asym+v=affine:4:asym"])
def test_blocks_valid_in_part(recipe):
    """A crop ends inside a block, and what follows begins a new one."""
    model = filled(recipe, Geometry(4, 2, 64, 64), [600])
    model.crop(301)
    model.feed(spread(model.geometry.chunk(1, 300, 5)))
    poison(model.store)
    assert any(entry.valid < 128 for entry in model.store.table.rows[0][:-1])
    assert_like_reference(model, 3)


def left_padded(lengths: list[int], total: int) -> torch.Tensor:
    real = torch.arange(total)[None] >= total - torch.tensor(lengths)[:, None]
    return real[:, None, None, :]


@pytest.mark.parametrize("kind", ["bool", "lowest", "per head"])
def test_a_ragged_batch_with_left_padding(kind):
    """One row packs two blocks, one packs one, one packs none; masks of both kinds, softcap and attention sinks."""
    geometry = Geometry(4, 2, 64, 64)
    model = Single(recipe_of("slim4"), geometry)
    length, queries = 400, 3
    real = left_padded([400, 290, 50], length)
    triangle = torch.ones(length, length, dtype=torch.bool).tril()
    model.feed(spread(geometry.chunk(3, length, 0)), (real & triangle).expand(3, 1, length, length))
    poison(model.store)
    assert [row.packed for row in model.store.rows] == [256, 128, 0]
    assert model.store.rows[2].holes == ((0, 350),)
    seen = torch.ones(3, 1, queries, length + queries, dtype=torch.bool).tril(length) & torch.nn.functional.pad(
        real, (0, queries), value=True
    )
    seen[:, :, :, 200:230] = False  # and a gap among stored tokens
    mask = seen
    if kind == "lowest":
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    elif kind == "per head":
        random = torch.Generator().manual_seed(1)
        mask = torch.randn(3, 4, *seen.shape[2:], generator=random).masked_fill(~seen, -torch.inf)
    score = Score(0.125, softcap=20.0, sinks=torch.linspace(-1, 3, 4))
    assert_like_reference(model, queries, mask=mask, score=score)


def test_rows_that_see_nothing_are_zero():
    model = filled("int8", Geometry(2, 1, 64, 64), [270])
    mask = torch.ones(1, 1, 2, 272, dtype=torch.bool).tril(270)
    mask[:, :, 0] = False
    query, key, value = model.geometry.chunk(1, 2, 9)
    layer = TritonLayer(model.store, "hopper", 1)
    out = layer.attend(query, model.store, (key, value), mask, model.geometry.score)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert out[:, :, 1].abs().min() > 0


def paged_layer(lengths: list[int], table: BlockTable, recipe: str = PRESETS["slim4p"].recipe) -> LayerCache:
    """A page-safe layer with rotary keys, as a calibration describes them."""
    half = torch.arange(32)
    prior = {
        "plain_mean": 3 * torch.randn(2, 64, generator=torch.Generator().manual_seed(3)),
        "rope_pairs": torch.stack((half, half + 32))[:, 4:],  # eight channels do not turn
        "rope_frequency": 10000.0 ** -(half.double()[4:] / 32),
    }
    layer = LayerCache(Recipe.parse(recipe), 0, table, prior=lambda: prior)
    for seed, length in enumerate(lengths):
        feed(layer, length, seed)
    return layer


def feed(layer: LayerCache, length: int, seed: int) -> None:
    query, key, value = spread(Geometry(4, 2, 64, 64).chunk(1, length, seed))
    layer.append(key, value)
    layer.attend(query, None, Score(0.125))


def difference(layer: LayerCache, queries: int) -> float:
    """Largest difference from the reference, of the largest output."""
    store = layer.store
    query, key, value = spread(Geometry(4, 2, 64, 64).chunk(1, queries, 99))
    want = reference.attend(query, store, (key, value), None, Score(0.125))
    got = TritonLayer(store, "hopper", 1).attend(query, store, (key, value), None, Score(0.125))
    return float((got - want).abs().max() / want.abs().max())


def test_page_means():
    table = BlockTable(BlockAllocator(), 64)
    assert difference(paged_layer([150, 1, 30], table), 3) < HALF


def test_a_layer_that_an_earlier_one_is_ahead_of():
    """After a fork the first layer has begun a copy of the shared last block; the second one still reads the original."""
    table = BlockTable(BlockAllocator(), 64)
    layers = [paged_layer([100], table) for _ in range(2)]
    other = table.fork()
    forks = [layer.fork(other) for layer in layers]
    feed(forks[0], 1, 7)
    assert other.copied(0)[0] >= 0
    assert forks[1].store.rows[0].packed < other.tokens(0)
    assert difference(forks[1], 1) < HALF
    feed(forks[1], 1, 7)
    assert difference(forks[1], 1) < HALF


def test_a_layout_wider_than_the_kernels_go():
    layout = Single("int8", Geometry(1, 1, 16, 16)).layer.recipe
    packer = SidePacker(layout.key, 2048, 128, "fp16")
    with pytest.raises(NoTritonFormError, match="2048 stored channels: the kernels go to 1024"):
        side_form(packer.layout, packer.codec.table(), "k")


class OnGPU:
    """What dispatch asks of a store before it reads it."""

    device = torch.device("cuda", 0)


def test_why_the_reference_serves_a_gpu(monkeypatch):
    monkeypatch.setattr(
        dispatch, "device_target", lambda device: "triton is not installed (pip install 'kvslim[triton]')"
    )
    assert dispatch.explain(OnGPU()) == (
        "reference",
        "torch only; triton is not installed (pip install 'kvslim[triton]')",
    )


def test_dispatch_chooses_triton_on_a_gpu(monkeypatch):
    """With the store on a CPU, which is all that is here."""
    model = filled("int8", Geometry(2, 1, 64, 64), [270])
    monkeypatch.setattr(dispatch, "_layer", lambda store: TritonLayer(store, "rdna3", 6))
    assert dispatch.explain(model.store) == ("triton", "fp32 sums, compiled for rdna3 at first use")
    query, key, value = model.geometry.chunk(1, 1, 9)
    got = dispatch.attend(query, model.store, (key, value), None, model.geometry.score)
    want = reference.attend(query, model.store, (key, value), None, model.geometry.score)
    assert (got - want).abs().max() < HALF * want.abs().max()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("arithmetic", [True, False])
def test_codes_become_the_values_of_the_table(name, arithmetic):
    """Whatever the form: unit times what the kernel computes is the table, to fp16's rounding."""
    recipe = Recipe.parse(PRESETS[name].recipe)
    for letter, side in (("k", recipe.key), ("v", recipe.value)):
        packer = SidePacker(side, 128, recipe.block, "fp16")
        table = packer.codec.table()
        form = side_form(packer.layout, table, letter, arithmetic=arithmetic)
        for codes in form.codes if table is not None else ():
            values = read_all(codes, kernel_table(form, table)) * codes.unit
            want = table[codes.table : codes.table + codes.entries]
            if codes.values == "e4m3":
                values[[127, 255]] = 0  # the format's NaN, which no code has
            torch.testing.assert_close(values, want, rtol=5e-4, atol=0)
            if codes.values != "table":
                assert torch.equal(values, want)


def read_all(codes: CodeForm, table: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(codes.entries)
    _read_all[(1,)](torch.arange(codes.entries, dtype=torch.uint8), table, out, codes)
    return out


@triton.jit
def _read_all(CODES, TABLE, OUT, F: tl.constexpr):
    at = tl.arange(0, F.entries)
    tl.store(OUT + at, values_of(tl.load(CODES + at)[None, :], TABLE, F, "load").reshape([F.entries]).to(tl.float32))
