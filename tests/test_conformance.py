"""kvslim.testing: every codec and preset conforms, and each way to break one is found and named."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from kvslim.bitpack import pack
from kvslim.cache import LayerCache
from kvslim.codecs import CODECS
from kvslim.codecs.affine import AffineCodec
from kvslim.codecs.base import Codec, token_layout
from kvslim.codecs.qjl import QJLCodec
from kvslim.codecs.table import TableCodec
from kvslim.errors import InputError, RecipeError
from kvslim.layout import Part
from kvslim.presets import PRESETS
from kvslim.store.layer import LayerStore
from kvslim.testing import ConformanceError, check_codec, check_recipe
from kvslim.transforms.balance import Balanced
from kvslim.transforms.center import Mean

# besides the defaults: other scales, statistics and tables, and one of each kind of scale fit
VARIANTS = (
    "affine:8:scale=block",
    "affine:3:asym:scale=32",
    "affine:4:asym:scale=channel",
    "affine:1:asym",
    "table:2:mean:std",
    "table:5:scale=16:fit=plain",
    "table:3:fit=search",
    "table:4:kind=nf:scale=64",
    "table:4:feedback",
    "fp4:scale=e4m3:fourorsix",
    "float8:kind=e5m2",
    "qjl:3",
    "outlier:2",
    "kvarn:2",
    "equalize:4:clip=percentile",
    "equalize:4:window=3",
    "equalize:4:window=2:predict",
)


@pytest.mark.parametrize("name", [*CODECS, *VARIANTS])
def test_every_codec_conforms(name):
    check_codec(name)


@pytest.mark.parametrize("name", [*PRESETS, "k8v4", "int8+layer.1-2=slim2"])
def test_every_preset_conforms(name):
    check_recipe(name)


def test_a_codec_may_be_a_class_or_an_object():
    check_codec(AffineCodec)
    check_codec(AffineCodec(3, asym=True), mse_bound=0.1)
    with pytest.raises(InputError, match="expected a codec.*got 4"):
        check_codec(4)
    with pytest.raises(RecipeError, match="Did you mean 'affine'"):
        check_codec("afine:4")


def test_neither_pytest_nor_hypothesis_is_needed():
    code = "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None; import kvslim.testing as t; t.check_codec('none')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_failures_are_listed_at_once():
    with pytest.raises(ConformanceError) as caught:
        check_codec(Unclamped())
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(f"fails {len(lines) - 1} times:")
    assert all(line.startswith("- ") for line in lines[1:])
    assert isinstance(caught.value, AssertionError)


def test_a_stated_error_that_is_not_met():
    with pytest.raises(ConformanceError, match=r"head_dim=64: mean square error 0\.0\d+, stated 0\.001"):
        check_codec("affine:4", mse_bound=0.001)


# -- broken codecs -----------------------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Symmetric 4-bit codes for given scales (..., tokens, 1)."""
    token = scale.clamp_min(1e-6).half()
    return {"code": pack((torch.round(x / token.float()).clamp(-7, 7) + 7).to(torch.uint8), 4), "token": token}


@dataclass(frozen=True)
class Plain(Codec):
    """Symmetric 4-bit codes; correct."""

    bits: int = 4

    def layout(self, head_dim, block):
        return token_layout(head_dim, block, self.bits, head_dim, (Part("token", (block, 1), "fp16"),))

    def table(self):
        return torch.arange(16, dtype=torch.float32) - 7

    def encode(self, x, feedback=None):
        return scaled(x, x.abs().amax(-1, keepdim=True) / 7)


class Unclamped(Plain):
    """Divides by the scale of a row of zeros."""

    def encode(self, x, feedback=None):
        token = (x.abs().amax(-1, keepdim=True) / 7).half()
        codes = torch.round(x / token.float()).clamp(-7, 7) + 7
        return {"code": pack(codes.nan_to_num(15.0).to(torch.uint8), 4), "token": token / token * token}


class OneScaleForAllBlocks(Plain):
    def encode(self, x, feedback=None):
        return scaled(x, (x.abs().amax((0, -1), keepdim=True) / 7).expand(len(x), -1, x.shape[2], -1))


class OneScaleForAllHeads(Plain):
    def encode(self, x, feedback=None):
        return scaled(x, (x.abs().amax((1, -1), keepdim=True) / 7).expand(-1, x.shape[1], -1, -1))


class FrozenTooEarly(Plain):
    """The scale of the first token of a call serves all."""

    def encode(self, x, feedback=None):
        return scaled(x, (x[:, :, :1].abs().amax(-1, keepdim=True) / 7).expand(-1, -1, x.shape[2], -1))


class Dithered(Plain):
    def encode(self, x, feedback=None):
        return super().encode(x + torch.rand(x.shape) * 0.1)


class InPlace(Plain):
    def encode(self, x, feedback=None):
        return super().encode(x.mul_(1.5))


class NeedsDense(Plain):
    def encode(self, x, feedback=None):
        return super().encode(x.as_strided(x.shape, torch.empty(x.shape).stride()))


class WiderThanDeclared(Plain):
    def encode(self, x, feedback=None):
        parts = super().encode(x)
        return {**parts, "token": parts["token"].float()}


class UndeclaredPart(Plain):
    def encode(self, x, feedback=None):
        return {**super().encode(x), "zero": x[..., :1].half()}


class Unlucky48(Plain):
    def layout(self, head_dim, block):
        if head_dim == 48:
            raise AssertionError
        return super().layout(head_dim, block)


class Wordless48(Plain):
    def layout(self, head_dim, block):
        if head_dim == 48:
            raise ValueError("bad head_dim")
        return super().layout(head_dim, block)


class ShortTable(Plain):
    def table(self):
        return super().table()[:15]


class OffByOne(Plain):
    def table(self):
        return super().table() + 1


class HalfMapped(Plain):
    """Queries are mapped, values are not mapped back."""

    def expand_query(self, query):
        return query.flip(-1)


class UnknownPart(Plain):
    def layout(self, head_dim, block):
        return token_layout(head_dim, block, 4, head_dim, (Part("scale", (block, 1), "fp16"),))

    def encode(self, x, feedback=None):
        parts = super().encode(x)
        return {"code": parts["code"], "scale": parts["token"]}


@dataclass
class Mutable(Codec):
    bits: int = 4
    layout, table, encode = Plain.layout, Plain.table, Plain.encode


class Opaque(Plain):
    """A setting that no recipe can spell."""

    def __init__(self, levels=(1, 2)):
        object.__setattr__(self, "bits", levels)

    def layout(self, head_dim, block):
        return token_layout(head_dim, block, 4, head_dim, (Part("token", (block, 1), "fp16"),))


BROKEN = {
    Unclamped: "Zeros stay zero.*0 comes back as nan(.|\n)*token holds NaN or Inf",
    OneScaleForAllBlocks: "token of a block depends on the blocks beside it",
    OneScaleForAllHeads: "token of a kv head depends on the others",
    FrozenTooEarly: "token of tokens 31 to 31 differs when they come alone",
    Dithered: "code differs a second time",
    InPlace: r"encode\(\) changed its input",
    NeedsDense: "differs from a strided view",
    WiderThanDeclared: r"token is \(3, 2, 32, 1\) torch.float32, the layout says",
    UndeclaredPart: r"parts are \['code', 'token', 'zero'\], the layout has \['code', 'token'\]",
    Unlucky48: "head_dim=48 raises AssertionError",
    Wordless48: "head_dim=48 is refused with 'bad head_dim', which names not both",
    ShortTable: r"it has shape \(15,\) for 16 codes",
    OffByOne: "0 comes back as",
    UnknownPart: "part 'token' is missing",
    HalfMapped: r"expand_query\(\) does not agree",
    Mutable: "cannot be hashed.*frozen=True",
    Opaque: "a recipe can spell: raised RecipeError",
}


def test_the_codec_that_the_broken_ones_are_made_from_conforms():
    check_codec(Plain())


@pytest.mark.parametrize("codec", BROKEN, ids=lambda codec: codec.__name__)
def test_what_a_codec_breaks_is_named(codec):
    with pytest.raises(ConformanceError, match=BROKEN[codec]):
        check_codec(codec())


# -- broken layers and transforms, seen through a recipe -----------------------------------------------------------------


def no_bias(self, q):
    return q, None


def crop_that_forgets_the_tail(self, length):
    for row in self.rows:
        row.packed = max(0, min(row.packed, length - row.sinks))
        row.sinks = min(row.sinks, length)
    self.length = length
    return [row.packed for row in self.rows]


def fork_that_shares_exact_tokens(self, table, fork=LayerStore.fork):
    other = fork(self, table)
    self._exact_shared = other._exact_shared = False  # forgets to copy them before the next token is written
    return other


@pytest.mark.parametrize(
    ("recipe", "kind", "name", "broken", "says"),
    [
        ("k=balance/affine:4+v=none", Balanced, "query", lambda self, q: (q, None), "scores of keys are off by"),
        ("k=center/affine:4+v=none", Mean, "query", no_bias, "scores of keys are off by"),
        ("k=none+v=center/none", Mean, "output", lambda self, acc, mass: acc, "sums of values are off by"),
        ("int8", LayerCache, "_check", lambda self, key, value: (1.0, 1.0), "nan in keys is taken"),
        ("int8", LayerStore, "crop", crop_that_forgets_the_tail, "tokens are held after a crop to"),
        ("int8", LayerStore, "fork", fork_that_shares_exact_tokens, "exact keys of sequence 0 of the parent changed"),
    ],
)
def test_what_breaks_under_a_recipe_is_named(recipe, kind, name, broken, says, monkeypatch):
    monkeypatch.setattr(kind, name, broken)
    with pytest.raises(ConformanceError, match=says):
        check_recipe(recipe)


# -- what derives from a codec that the kernels know ---------------------------------------------------------------------


class ReversedTable(TableCodec):
    """Packs the channels the other way round, and reads them so."""

    def encode(self, x, feedback=None):
        return super().encode(x.flip(-1))

    def expand_query(self, query):
        return query.flip(-1)

    def reduce_output(self, acc):
        return acc.flip(-1)


class ScaledSketch(QJLCodec):
    """Stores twice the value."""

    def encode(self, x, feedback=None):
        return super().encode(2 * x)

    def expand_query(self, query):
        return super().expand_query(query / 2)

    def reduce_output(self, acc):
        return super().reduce_output(acc / 2)


@pytest.mark.parametrize("codec", [ReversedTable(4), ScaledSketch(4)], ids=lambda codec: type(codec).__name__)
def test_native_kernels_do_not_take_a_derived_codec_for_the_one_they_know(codec):
    check_codec(codec)
