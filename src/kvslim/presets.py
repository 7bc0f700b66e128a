"""Presets as data: a name, the recipe it stands for, where it comes from, and one measured figure each.

Figures are KL(16 bits || recipe), mean over three passages of WikiText-2 test (1,024 tokens stored, 512 scored in
chunks of 32, fp32 weights), on Qwen2.5-Coder-0.5B and 1.5B and Gemma 3 270M: those of docs/results, which a test
compares. docs/recipes.md has the whole table and a page for each family.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A named recipe.

    Attributes
    ----------
    name, recipe, summary : str
    source : str
        Where the scheme was published, or "kvslim".
    figures : str
        One measured figure with its model and protocol (docs/recipes.md has the whole table).
    note : str
        What to know before using it; empty if nothing.
    fragile : bool
        Whether it breaks where keys lie around a mean much larger than their spread; a cache warns when it meets that.
    """

    name: str
    recipe: str
    summary: str
    source: str
    figures: str
    note: str = ""
    fragile: bool = False


_KIVI = "k=affine:{b}:asym:scale=channel+v=affine:{b}:asym:scale=32+block=32"
_SLIM = "k=balance/rotate/table:{k}:mean:feedback:fit=search+v=rotate/table:{v}:fit=search"
_SLIM_PAGE = (
    "k=center:kind=page/balance/rotate/table:{b}:feedback:fit=search+v=rotate/table:{b}:fit=search+block=64+immediate"
)
# levels snapped to integers, which kernels multiply as such: .2 % more squared error at 4 bits, none at 3 and 2
_SNAPPED = {2: "2:kind=lloydint", 3: "3:kind=lloydint", 4: "4:kind=lloydint"}
_TURBO = "rotate:kind=orthogonal/table:{b}:fit=plain"
_TURBO_BAD = "gives nonsense on models with large key biases (Qwen2.5); use slim4"

_ALL = (
    Preset("none", "k=none+v=none", "16-bit control: same store and attention, nothing quantized", "kvslim", "exact"),
    Preset(
        "slim4",
        _SLIM.format(k=_SNAPPED[4], v=_SNAPPED[4]),
        "block mean, q/k balance, Hadamard, Lloyd-Max with write-time feedback; 4 bits",
        "kvslim",
        "KL .0018 Qwen 0.5B, .0006 Qwen 1.5B, .0011 Gemma 270M",
    ),
    Preset(
        "slim3",
        _SLIM.format(k=_SNAPPED[3], v=_SNAPPED[3]),
        "slim4 at 3 bits",
        "kvslim",
        "KL .0091 Qwen 0.5B, .0036 Qwen 1.5B, .0072 Gemma 270M",
    ),
    Preset(
        "slim2",
        _SLIM.format(k=_SNAPPED[2], v=_SNAPPED[2]) + "+recent=128",
        "slim4 at 2 bits, 128 exact recent tokens",
        "kvslim",
        "KL .066 Qwen 0.5B, .028 Qwen 1.5B, .038 Gemma 270M",
        "lossy on small models: long structured answers break; use slim3 there",
    ),
    Preset(
        "slim4p",
        _SLIM_PAGE.format(b=_SNAPPED[4]),
        "page-safe slim4: no block statistics, no tail, every token packed at once",
        "kvslim",
        "KL .0034 Qwen 0.5B, .0014 Qwen 1.5B, .0018 Gemma 270M",
    ),
    Preset(
        "slim3p",
        _SLIM_PAGE.format(b=_SNAPPED[3]),
        "page-safe slim3",
        "kvslim",
        "KL .017 Qwen 0.5B, .0084 Qwen 1.5B, .0091 Gemma 270M",
    ),
    Preset(
        "k4v2",
        _SLIM.format(k=_SNAPPED[4], v=_SNAPPED[2]),
        "slim keys at 4 bits, values at 2",
        "kvslim",
        "KL .024 Qwen 0.5B, .013 Qwen 1.5B, .016 Gemma 270M",
        "about three times the divergence of slim3 at the same bits; use slim3",
    ),
    Preset(
        "int8",
        "k=affine:8:scale=block+v=affine:8:scale=block",
        "one symmetric scale per head and block, 8 bits",
        "per-head symmetric integers",
        "KL .0012 Qwen 0.5B, .0007 Qwen 1.5B, .0020 Gemma 270M",
        "k8v4 is closer at a fifth fewer bits",
    ),
    Preset(
        "int4",
        "k=affine:4:scale=block+v=affine:4:scale=block",
        "one symmetric scale per head and block, 4 bits",
        "per-head symmetric integers",
        "KL .16 Qwen 0.5B, .22 Gemma 270M",
        "changes more than one token in five on Qwen2.5 and Gemma 3; use slim4",
        fragile=True,
    ),
    Preset(
        "kivi4",
        _KIVI.format(b=4),
        "K per channel over 32 tokens, V per token in groups of 32, asymmetric, 4 bits",
        "arXiv 2402.02750",
        "KL .0043 Qwen 0.5B, .0013 Qwen 1.5B, .0020 Gemma 270M",
    ),
    Preset(
        "kivi2",
        _KIVI.format(b=2),
        "K per channel over 32 tokens, V per token in groups of 32, asymmetric, 2 bits",
        "arXiv 2402.02750",
        "KL .16 Qwen 0.5B, .061 Gemma 270M",
        "lossy on small models; slim3p is six to ten times closer at about the same bits",
    ),
    Preset(
        "log4",
        "k=balance/rotate/table:4:kind=log:mean+v=rotate/table:4:kind=log",
        "slim4's basis with log-spaced levels, no feedback",
        "log-spaced codes",
        "KL .0067 Qwen 0.5B, .0036 Gemma 270M",
        "about three times the divergence of slim4 at the same bits; use slim4",
    ),
    Preset(
        "nf4",
        "k=table:4:kind=nf:scale=64:fit=plain+v=table:4:kind=nf:scale=64:fit=plain",
        "NormalFloat levels, groups of 64 channels, no transform",
        "arXiv 2305.14314",
        "KL .14 Qwen 0.5B, .059 Gemma 270M",
        "changes one token in five on models with large key biases (Qwen2.5), one in seven on Gemma 3; use slim4",
        fragile=True,
    ),
    *(
        Preset(
            f"turbo{b}",
            f"k={_TURBO.format(b=b)}+v={_TURBO.format(b=b)}",
            f"TurboQuant: random rotation, norm in fp16, Lloyd-Max, {b} bits",
            "arXiv 2504.19874",
            figure,
            _TURBO_BAD,
            fragile=True,
        )
        for b, figure in (
            (4, "KL 2.9 Qwen 0.5B, 6.2 Qwen 1.5B, .040 Gemma 270M"),
            (3, "KL 1.2 Qwen 0.5B, .28 Gemma 270M"),
            (2, "KL 1.7 Qwen 0.5B, .87 Gemma 270M"),
        )
    ),
    Preset(
        "turbo4-qjl",
        f"k=rotate:kind=orthogonal/qjl:4+v={_TURBO.format(b=4)}",
        "TurboQuant's prod form: 3 bits and a sign of the projected residual, unbiased scores",
        "arXiv 2504.19874",
        "KL 3.0 Qwen 0.5B, .47 Gemma 270M",
        _TURBO_BAD,
        fragile=True,
    ),
    Preset(
        "turbo3.5",
        "k=outlier/rotate:kind=orthogonal:parts=32/outlier:3+v=outlier/rotate:kind=orthogonal:parts=32/outlier:3",
        "TurboQuant with 32 outlier channels at one bit more, two instances",
        "arXiv 2504.19874",
        "KL .81 Qwen 0.5B, .030 Gemma 270M",
        _TURBO_BAD,
        fragile=True,
    ),
    Preset(
        "ultra4",
        "k=equalize:4:clip=mse+v=equalize:4:clip=mse",
        "blockwise variance equalization with a clip search, statistics of each block, 4 bits",
        "blockwise equalization",
        "KL .020 Qwen 0.5B, .078 Gemma 270M",
        "changes one token in six on Gemma 3, one in seventeen on Qwen2.5; use slim4",
    ),
    Preset(
        "ultrafp4",
        "k=rotate/fp4:c=0.156+v=fp4:c=0.156",
        "UltraQuant: E2M1 with power-of-two scales per 32 channels, K rotated",
        "arXiv 2606.20474",
        "KL .35 Qwen 0.5B, .11 Gemma 270M",
        "changes one token in four on models with large key biases (Qwen2.5), one in five on Gemma 3; use slim4",
        fragile=True,
    ),
    Preset(
        "nvfp4",
        "k=fp4:scale=e4m3:fourorsix+v=fp4:scale=e4m3:fourorsix",
        "E2M1, E4M3 scales per 16 channels, largest code 4 or 6 by error",
        "NVFP4",
        "KL .064 Qwen 0.5B, .018 Gemma 270M",
        "changes one token in seven on models with large key biases (Qwen2.5), one in thirteen on Gemma 3; use slim4",
        fragile=True,
    ),
    Preset(
        "kvarn4",
        "k=rotate/kvarn:4+v=rotate/kvarn:4",
        "KVarN: Hadamard, two-sided variance balancing per block, asymmetric rounding",
        "arXiv 2606.03458",
        "KL 1.4 Qwen 0.5B, .062 Gemma 270M",
        "gives nonsense on models with large key biases (Qwen2.5), changes one token in six on Gemma 3; use slim4",
        fragile=True,
    ),
    Preset(
        "fp8",
        "k=float8+v=float8",
        "E4M3 with a scale per token and head",
        "FP8",
        "KL .0048 Qwen 0.5B, .0009 Gemma 270M",
        "k8v4 is closer at a quarter fewer bits; on Qwen2.5 slim4 is too, at half the bits",
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
DEFAULT_RECIPE = "slim4"
_PAIR = re.compile(r"k([1-8])v([1-8])$")


def pair(name: str) -> str | None:
    """Recipe string of a ``k8v4``-like name (bits of K, bits of V), or None if `name` is not one.

    Both sides are slim's, at the widths asked for.
    """
    match = _PAIR.match(name)
    if match is None:
        return None
    key, value = (_SNAPPED.get(int(bits), bits) for bits in match.groups())
    return _SLIM.format(k=key, v=value)
