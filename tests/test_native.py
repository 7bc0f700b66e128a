"""The CPU kernels against the reference: attention within a bound, encoders bit for bit, every instruction set here."""

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kvslim.attention import dispatch, reference
from kvslim.attention.reference import Score
from kvslim.cache import LayerCache
from kvslim.codecs.decode import decode
from kvslim.errors import InputError, PackingWarning
from kvslim.kernels import encode as encoding
from kvslim.kernels.cpu import abi, build, encoder, library
from kvslim.layout import STORAGE
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe
from kvslim.store.table import BlockAllocator, BlockTable
from kvslim.transforms.base import Fitted

# every preset that needs no calibration, and layouts that no preset has
RECIPES = (
    *(name for name in PRESETS if "kind=page" not in str(Recipe.parse(name))),
    "k8v4",
    "k=balance/rotate/table:5:mean+v=table:6",
    "k=rotate:signs/table:7:scale=16+v=affine:1:asym:scale=8",
    "k=table:2:scale=32+v=table:3:scale=32",
    "k=affine:8:scale=channel:asym+v=affine:8:asym",
    "k=fp4:c=0.2:group=64+v=float8:kind=e5m2",
    "k=center/rotate/table:4+v=center/balance/table:3:scale=16",
    "k=none:dtype=bf16+v=none:dtype=fp32",
    "slim4+immediate+k=rotate/table:4:feedback+v=rotate/table:4",
    "int8+sinks=0+recent=0",
)
PAGE_AND_SIGNS = "k=center:kind=page/rotate/qjl:4+v=rotate/table:4+block=64+immediate"
# errors allowed, of the largest output: both sides sum in fp32 in another order; where levels are small integers and the
# processor multiplies those, queries and weights are rounded to 15 bits (native/dots.h)
BOUND, BOUND_INTEGER = 2e-5, 2e-4


def filled(
    recipe: str, heads: int, kv_heads: int, dim: int, tokens: int, *, batch: int = 1, seed: int = 0
) -> LayerCache:
    """A layer that holds `tokens` tokens with a large mean per channel, as real keys have."""
    torch.manual_seed(seed)
    parsed = Recipe.parse(recipe)
    cache = LayerCache(parsed, 0, BlockTable(BlockAllocator(), parsed.block))
    spread = (1 + torch.arange(dim) % 7) / 3  # logits spread by about ten
    for start in range(0, tokens, 1000):
        count = min(1000, tokens - start)
        key = torch.randn(batch, kv_heads, count, dim) * spread + 3 * spread
        cache.append(key, torch.randn(batch, kv_heads, count, dim))
        cache.settle(torch.randn(batch, heads, count, dim), None)
    return cache


def question(cache: LayerCache, heads: int, queries: int, seed: int = 1) -> tuple:
    """Query and chunk as a model hands them over: not contiguous, heads and tokens swapped."""
    torch.manual_seed(seed)
    store = cache.store
    batch, dims = len(store.rows), store.head_dims
    query = torch.randn(batch, queries, heads, dims[0]).transpose(1, 2) / 3
    chunk = tuple(torch.randn(batch, queries, store.kv_heads, dim).transpose(1, 2) for dim in dims)
    return query, chunk


def bound_of(cache: LayerCache) -> float:
    return BOUND_INTEGER if "integer levels" in dispatch.explain(cache.store)[1] else BOUND


def assert_same(cache: LayerCache, query, chunk, mask=None, score=None, bound=0.0, causal=True) -> torch.Tensor:
    score, bound = score or Score(query.shape[-1] ** -0.5), bound + bound_of(cache)
    want = reference.attend(query, cache.store, chunk, mask, score, causal=causal)
    name, reason = dispatch.explain(cache.store)
    assert name == f"native {library.native().isa}", reason
    got = dispatch.attend(query, cache.store, chunk, mask, score, causal=causal)
    assert got.dtype == query.dtype
    assert got.shape == want.shape
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error < bound
    return got


def rotary_prior(kv_heads: int) -> dict[str, torch.Tensor]:
    """Calibration of a layer with 64 channels that turn in halves, around a large mean before RoPE."""
    torch.manual_seed(0)
    return {
        "rope_pairs": torch.stack((torch.arange(32), torch.arange(32, 64))),
        "rope_frequency": 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32),
        "plain_mean": 5 * torch.randn(kv_heads, 64),
        "query_moment": torch.eye(64).expand(kv_heads, 64, 64),
        "key_power": torch.ones(kv_heads, 64),
    }


def usable(recipe: str, dim: int) -> bool:
    try:
        filled(recipe, 2, 1, dim, 8)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("recipe", ["slim4", "slim3", "kivi4", "int8", "fp8", "log4", "turbo4"])
def test_the_report_says_where_products_are_integers(recipe, native_kernels):
    """Integers round queries to 15 bits, which is seen in the error; fp32 sums are a hundred times nearer."""
    cache = filled(recipe, 4, 2, 64, 300)
    query, chunk = question(cache, 4, 1)
    score = Score(query.shape[-1] ** -0.5)
    want = reference.attend(query, cache.store, chunk, None, score)
    got = dispatch.attend(query, cache.store, chunk, None, score)
    error = (got - want).abs().max() / want.abs().max()
    integer = "integer levels" in dispatch.explain(cache.store)[1]
    assert (error > BOUND) == integer
    if recipe in ("slim4", "slim3", "kivi4", "int8"):
        assert integer == (native_kernels.isa in ("avx2", "avx512"))
    else:
        assert not integer


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (7, 1, 128), (9, 1, 96), (2, 2, 80), (3, 1, 256)])
def test_attention_equals_the_reference(recipe, heads, kv_heads, dim, native_kernels):
    if not usable(recipe, dim):
        pytest.skip(f"{recipe} refuses head_dim={dim}")
    cache = filled(recipe, heads, kv_heads, dim, 300)
    for queries in (1, 3):
        assert_same(cache, *question(cache, heads, queries))


@pytest.mark.parametrize("recipe", ["slim4", "slim3", "slim2", "kivi4", "int8", "none"])
@pytest.mark.parametrize("tokens", [1, 63, 100, 127, 128, 129, 132, 196, 200, 333, 2000])
def test_odd_lengths(recipe, tokens, native_kernels):
    cache = filled(recipe + "+recent=0", 4, 2, 64, tokens)
    assert_same(cache, *question(cache, 4, 1))
    assert_same(cache, *question(cache, 4, 37))


@pytest.mark.parametrize("dim", [16, 32, 40, 48, 72, 112, 160, 192, 224, 512])
def test_head_dims(dim, native_kernels):
    for recipe in ("slim4", "int4", "fp8"):
        cache = filled(recipe, 4, 2, dim, 200)
        assert_same(cache, *question(cache, 4, 2))


@pytest.mark.parametrize("queries", [9, 100, 150])
def test_many_queries_take_the_rows_in_runs(queries, native_kernels):
    """Chunks of a prefill: more rows than go through a tile at once, and more than one task holds."""
    for recipe in ("slim4", "kivi4", "nvfp4"):
        cache = filled(recipe, 6, 2, 64, 400)
        assert_same(cache, *question(cache, 6, queries))
        assert_same(cache, *question(cache, 6, queries), causal=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_and_out(dtype, native_kernels):
    cache = filled("slim4", 4, 2, 64, 300)
    query, chunk = question(cache, 4, 3)
    step = torch.finfo(dtype).eps
    assert_same(cache, query.to(dtype), tuple(each.to(dtype) for each in chunk), bound=step)


def test_softcap_and_attention_sinks(native_kernels):
    cache = filled("slim4", 4, 2, 64, 300)
    query, chunk = question(cache, 4, 3)
    plain = assert_same(cache, query, chunk)
    capped = assert_same(cache, query, chunk, score=Score(0.125, softcap=1.5))
    sunk = assert_same(cache, query, chunk, score=Score(0.125, sinks=torch.tensor([3.0, -1.0, 8.0, 0.0])))
    assert (capped - plain).abs().max() > 0.01
    assert sunk[:, 2].abs().max() < plain[:, 2].abs().max()


@pytest.mark.parametrize("kind", ["bool", "float", "half", "per head"])
def test_masks(kind, native_kernels):
    cache = filled("slim4", 4, 2, 64, 300, batch=2)
    query, chunk = question(cache, 4, 5)
    torch.manual_seed(3)
    seen = torch.rand(2, 4 if kind == "per head" else 1, 5, 305) > 0.4
    seen[..., 0] = True
    mask = seen
    if kind == "float":
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    if kind == "half":
        mask = torch.zeros(seen.shape, dtype=torch.float16).masked_fill(~seen, -torch.inf)
    assert_same(cache, query, chunk, mask)


def test_a_query_that_sees_nothing_gets_zeros(native_kernels):
    cache = filled("slim4", 4, 2, 64, 300)
    query, chunk = question(cache, 4, 2)
    seen = torch.ones(1, 1, 2, 302, dtype=torch.bool)
    seen[:, :, 0] = False
    got = assert_same(cache, query, chunk, seen)
    assert got[:, :, 0].abs().max() == 0


def test_ragged_rows_and_padding(native_kernels):
    """Rows of 3, 17, 130 and 400 tokens, padded on the left: padding is hidden, and columns are counted past it."""
    recipe = Recipe.parse("slim4+recent=16+block=32")
    cache = LayerCache(recipe, 0, BlockTable(BlockAllocator(), 32))
    torch.manual_seed(0)
    real = torch.zeros(4, 400, dtype=torch.bool)
    for row, length in enumerate((3, 17, 130, 400)):
        real[row, 400 - length :] = True
    mask = real[:, None, None, :].expand(4, 1, 400, 400) & torch.ones(400, 400, dtype=torch.bool).tril()
    cache.append(torch.randn(4, 2, 400, 64), torch.randn(4, 2, 400, 64))
    cache.settle(torch.randn(4, 4, 400, 64), mask)
    assert [row.packed for row in cache.store.rows] == [0, 0, 96, 352]
    for queries in (1, 6):
        seen = torch.cat((real, torch.ones(4, queries, dtype=torch.bool)), dim=1)
        triangle = torch.ones(queries, 400 + queries, dtype=torch.bool).tril(400)
        assert_same(cache, *question(cache, 4, queries), mask=seen[:, None, None, :] & triangle)


def test_page_means_by_position(native_kernels):
    """slim4p: what a block's rotary mean adds to its scores, at the start of a sequence and far from it."""
    dim, heads, kv_heads = 64, 4, 2
    prior = rotary_prior(kv_heads)
    for name, origin in (("slim4p", 0), ("slim4p", 100_000), (PAGE_AND_SIGNS, 1000)):
        recipe = Recipe.parse(name)
        cache = LayerCache(recipe, 0, BlockTable(BlockAllocator(), recipe.block), lambda: prior)
        cache.append(torch.randn(1, kv_heads, 500, dim), torch.randn(1, kv_heads, 500, dim))
        cache.settle(torch.randn(1, heads, 500, dim), None, torch.arange(origin, origin + 500)[None])
        assert cache.store.rows[0].origin == origin
        assert_same(cache, *question(cache, heads, 3))
        cache.table.crop(0, cache.crop(470)[0])  # a block that ends early: positions go on, slots do not
        assert_same(cache, *question(cache, heads, 3))


@pytest.mark.parametrize("recipe", ["slim4+recent=0", "kivi4+recent=0", "int8+recent=0", "none+recent=0"])
def test_what_lies_beyond_the_valid_tokens_is_never_read(recipe, native_kernels):
    cache = filled(recipe, 4, 2, 64, 260)
    cache.table.crop(0, cache.crop(200)[0])
    query, chunk = question(cache, 4, 2)
    before = assert_same(cache, query, chunk)
    store = cache.store
    kept = {entry.block for entry in cache.table.rows[0]}
    for slab, start in zip(store.pool.slabs, store.pool.starts, strict=True):
        for parts in slab.values():
            for tensor in parts.values():
                poison = 255 if tensor.dtype == torch.uint8 else torch.nan
                for index in range(len(tensor)):
                    if start + index not in kept:
                        tensor[index] = poison
    last = cache.table.rows[0][-1]
    for side in "kv":
        for name, tensor in store.pool.read(side, [last.block]).parts.items():
            if name in ("code", "token", "zero"):
                tensor[:, :, last.valid :] = 255 if tensor.dtype == torch.uint8 else torch.nan
    exact = store.rows[0].sinks + store.rows[0].tail
    store.key[:, :, exact:] = store.value[:, :, exact:] = torch.nan
    assert torch.equal(before, dispatch.attend(query, store, chunk, None, Score(64**-0.5)))


def test_threads_change_only_the_last_bits(native_kernels):
    cache = filled("slim4", 8, 2, 64, 3000)
    query, chunk = question(cache, 8, 20)
    one = dispatch.attend(query, cache.store, chunk, None, Score(0.125))
    torch.set_num_threads(2)  # the fixture of every test sets it back
    two = dispatch.attend(query, cache.store, chunk, None, Score(0.125))
    assert (one - two).abs().max() / one.abs().max() < bound_of(cache)
    assert_same(cache, query, chunk)


def test_against_float64(native_kernels):
    """The stated bound, 2e-4 of float64 attention on the dequantized values; fp32 sums are far inside it."""
    cache = filled("slim4+recent=0+sinks=0", 4, 2, 128, 2048)
    store = cache.store
    query, chunk = question(cache, 4, 1)
    keys, values = (_decoded(store, side, frozen) for side, frozen in zip("kv", store.rows[0].frozen, strict=True))
    key, value = keys.double(), store.rows[0].frozen[1].chain.output(values, torch.zeros(1)).double()
    q, _ = store.rows[0].frozen[0].chain.query(query[0].reshape(2, 2, 128))
    scores = torch.cat((q.double() @ key.mT, (query[0].reshape(2, 2, 128).double() @ chunk[0][0].double().mT)), dim=-1)
    weights = torch.softmax(scores * 128**-0.5, dim=-1)
    want = weights @ torch.cat((value, chunk[1][0].double()), dim=1)
    got = dispatch.attend(query, store, chunk, None, Score(128**-0.5))[0].reshape(2, 2, 128)
    assert (got - want).abs().max() / want.abs().max() < bound_of(cache)


def _decoded(store, side: str, frozen) -> torch.Tensor:
    blocks = [entry.block for entry in store.table.rows[0]]
    return decode(store.pool.read(side, blocks), frozen.table).transpose(0, 1).flatten(1, 2)


ENCODERS = (
    *("slim4", "slim3", "slim2", "k4v2", "k8v8", "k1v5", "log4"),
    "k=table:5:kind=log:fit=norm+v=table:4:kind=nf:fit=eden",
    "k=balance/rotate/table:4:mean+v=rotate:signs/table:3:fit=plain",
    "k=rotate/table:4:feedback:fit=eden+v=center/table:6:fit=search",
    "k=outlier/rotate:parts=32/table:4+v=rotate/table:4:kind=lloydint",
)


@pytest.mark.parametrize("recipe", ENCODERS)
@pytest.mark.parametrize(("dim", "block"), [(64, 128), (128, 64), (96, 32), (80, 16), (256, 128), (40, 48)])
def test_bytes_equal_the_references(recipe, dim, block, native_kernels):
    cache = filled(f"{recipe}+block={block}", 4, 2, dim, 3 * block + 200)
    for packer, frozen in zip(cache.store.packers, cache.store.rows[0].frozen, strict=True):
        whole = any(part.name in ("offset", "channel") for part in packer.layout.parts)
        for tokens in (block,) if whole else (block, 1, 5):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                x = (torch.randn(2, 2, tokens + 3, dim) * (1 + torch.arange(dim) % 5)).to(dtype)[:, :, 3:]
                x[0, 0, 0] = 0  # a zero token, a tiny one, a large one
                x[1, 0, -1] = 1e-6
                x[1, 1, 0] *= 1000
                starts = torch.zeros(2, dtype=torch.long)
                want = packer.encode(x.float(), frozen, starts).parts
                got = encoder.encode(native_kernels, packer, x, frozen, starts).parts
                for name, tensor in want.items():
                    assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), (name, tokens, dtype)


def test_page_safe_bytes_equal_the_references(native_kernels):
    dim, kv_heads = 64, 2
    prior = rotary_prior(kv_heads)
    recipe = Recipe.parse("slim3p")
    cache = LayerCache(recipe, 0, BlockTable(BlockAllocator(), recipe.block), lambda: prior)
    cache.append(torch.randn(1, kv_heads, 300, dim), torch.randn(1, kv_heads, 300, dim))
    cache.settle(torch.randn(1, 4, 300, dim), None)
    packer, frozen = cache.store.packers[0], cache.store.rows[0].frozen[0]
    x, starts = torch.randn(3, kv_heads, 64, dim), torch.tensor([4, 68, 70_000])
    want, got = packer.encode(x, frozen, starts).parts, encoder.encode(native_kernels, packer, x, frozen, starts).parts
    assert all(torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)) for name in want)


def test_a_whole_layer_holds_the_same_bytes_with_and_without(native_kernels):
    native = filled("slim4+recent=0", 4, 2, 64, 700).store
    library.use("off")
    plain = filled("slim4+recent=0", 4, 2, 64, 700).store
    for own, other in zip(native.pool.tensors(), plain.pool.tensors(), strict=True):
        assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))


# -- what is not native says so ------------------------------------------------------------------------------------------


def test_without_native_kernels_the_reference_answers_and_says_why(reference_only):
    cache = filled("slim4", 4, 2, 64, 300)
    query, chunk = question(cache, 4, 1)
    want = reference.attend(query, cache.store, chunk, None, Score(0.125))
    assert torch.equal(dispatch.attend(query, cache.store, chunk, None, Score(0.125)), want)
    name, reason = dispatch.explain(cache.store)
    assert name == "reference"
    assert "switched off" in reason


def test_an_unknown_transform_goes_to_the_reference_by_name(native_kernels):
    class Mirror(Fitted):
        def forward(self, x, starts=None):
            return -x

        def query(self, q):
            return -q, None

        def output(self, acc, mass):
            return -acc

    cache = filled("int4", 4, 2, 64, 300)
    for frozen in cache.store.rows[0].frozen:
        frozen.chain.steps = (Mirror(),)
    query, chunk = question(cache, 4, 1)
    want = reference.attend(query, cache.store, chunk, None, Score(0.125))
    assert torch.equal(dispatch.attend(query, cache.store, chunk, None, Score(0.125)), want)
    name, reason = dispatch.explain(cache.store)
    assert name == "reference"
    assert "Mirror" in reason


def test_orthogonal_rotations_are_encoded_by_the_reference(native_kernels):
    cache = filled("turbo4", 4, 2, 64, 300)
    packer, frozen = cache.store.packers[0], cache.store.rows[0].frozen[0]
    x, starts = torch.randn(1, 2, 128, 64), torch.zeros(1, dtype=torch.long)
    want, got = packer.encode(x, frozen, starts), encoding.encode(packer, x, frozen, starts)
    assert all(torch.equal(got.parts[name], want.parts[name]) for name in want.parts)


def test_an_instruction_set_that_does_not_run_here_is_refused():
    with pytest.raises(InputError, match=r"'sve9'.*portable"):
        library.use("sve9")
    assert library.native() is not None


def test_without_a_compiler_one_warning_names_the_next_step(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "PACKAGED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    library._found.cache_clear()
    try:
        with pytest.warns(PackingWarning, match=r"no C\+\+ compiler found; install g\+\+"):
            assert library.native() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert library.native() is None, "the second time says nothing"
        cache = filled("int4", 4, 2, 64, 300)
        assert "no C++ compiler" in dispatch.explain(cache.store)[1]
    finally:
        library._found.cache_clear()


def test_a_failing_compiler_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'library.cpp:1: error: no such luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match="no such luck"):
        build.build(tmp_path / "lib")
    assert not list((tmp_path / "lib").iterdir()), "nothing half-made is left"


def test_the_digest_follows_the_sources(monkeypatch, tmp_path):
    own = build.digest()
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.digest() == own
    with (tmp_path / "rows.h").open("a") as file:
        file.write("// changed\n")
    assert build.digest() != own


def test_structs_have_the_size_that_the_compiler_gives_them(tmp_path):
    """A field that one side forgot would shift all that follow it."""
    structs = (abi.Part, abi.Segment, abi.Side, abi.Step, abi.Row, abi.Exact, abi.Attend, abi.Encode)
    names = {f"kvs_{struct.__name__.lower()}": struct for struct in structs}
    lines = "".join(f'printf("{name} %zu\\n", sizeof({name}));' for name in names)
    source = tmp_path / "sizes.cpp"
    source.write_text(f'#include <cstdio>\n#include "{build.SOURCES / "kvslim.h"}"\nint main() {{ {lines} }}\n')
    program = tmp_path / "sizes"
    subprocess.run([build.compiler(), str(source), "-o", str(program)], check=True)
    out = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert dict(line.split() for line in out.splitlines()) == {
        name: str(ctypes.sizeof(struct)) for name, struct in names.items()
    }


def test_every_dtype_of_a_part_has_a_number():
    assert set(abi.PART_DTYPES) == set(STORAGE)


SANITIZED = """
import torch
torch.set_num_threads(1)
from kvslim.attention import dispatch, reference
from kvslim.attention.reference import Score
from kvslim.kernels.cpu import library
import test_native as t
for isa in {isas}:
    library.use(isa)
    for recipe in ("slim4", "slim3", "slim2", "kivi4", "int8", "nvfp4", "turbo4-qjl", "none", "k=table:5+v=table:6"):
        for dim, queries in ((64, 1), (128, 9), (72, 3)):
            if not t.usable(recipe, dim):
                continue
            cache = t.filled(recipe + "+recent=0", 4, 2, dim, 197)
            cache.table.crop(0, cache.crop(190)[0])
            t.assert_same(cache, *t.question(cache, 4, queries))
    mask = torch.ones(1, 1, 3, 193, dtype=torch.bool)
    t.assert_same(cache, *t.question(cache, 4, 3), mask=mask)
print("clean")
"""


def test_no_sanitizer_complains(tmp_path):
    """The same under AddressSanitizer and UndefinedBehaviorSanitizer: nothing is read or written out of bounds."""
    runtime = [
        Path(
            subprocess.run(
                [build.compiler(), f"-print-file-name={name}"], capture_output=True, text=True
            ).stdout.strip()
        )
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(path.is_absolute() for path in runtime):
        pytest.skip("the compiler has no sanitizers")
    home = tmp_path / "cache"
    folder = home / "kvslim" / "native" / build.digest()
    build.build(folder, ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
    best = library.native().isa
    isas = [isa for isa in build.isas() if build.isas().index(isa) <= build.isas().index(best)]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(home),
        "LD_PRELOAD": " ".join(map(str, runtime)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))),
    }
    script = "from kvslim.kernels.cpu import library; import pathlib; library.PACKAGED = pathlib.Path('none')\n"
    done = subprocess.run(
        [sys.executable, "-c", script + SANITIZED.format(isas=isas)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "clean"
