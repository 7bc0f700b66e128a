"""Presets as data: a name, the recipe it stands for, where it comes from, and one measured figure each."""

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
    """

    name: str
    recipe: str
    summary: str
    source: str
    figures: str
    note: str = ""


_KIVI = "k=affine:{b}:asym:scale=channel+v=affine:{b}:asym:scale=32+block=32+sinks=4+recent=32"

_ALL = (
    Preset("none", "k=none+v=none", "16-bit control: same store and attention, nothing quantized", "kvslim", "exact"),
    Preset(
        "int8",
        "k=affine:8:scale=block+v=affine:8:scale=block",
        "one symmetric scale per head and block, 8 bits",
        "per-head symmetric integers",
        "",
    ),
    Preset(
        "int4",
        "k=affine:4:scale=block+v=affine:4:scale=block",
        "one symmetric scale per head and block, 4 bits",
        "per-head symmetric integers",
        "",
        "wrong answers on models with large key biases (Qwen2.5) and on Gemma 3; use kivi4",
    ),
    Preset(
        "kivi4",
        _KIVI.format(b=4),
        "K per channel over 32 tokens, V per token in groups of 32, asymmetric, 4 bits",
        "arXiv 2402.02750",
        "",
    ),
    Preset(
        "kivi2",
        _KIVI.format(b=2),
        "K per channel over 32 tokens, V per token in groups of 32, asymmetric, 2 bits",
        "arXiv 2402.02750",
        "",
        "lossy on small models",
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
DEFAULT_RECIPE = "kivi4"
_PAIR = re.compile(r"k([1-8])v([1-8])$")


def pair(name: str) -> str | None:
    """Recipe string of a ``k8v4``-like name (bits of K, bits of V), or None if `name` is not one."""
    match = _PAIR.match(name)
    if match is None:
        return None
    key, value = match.groups()
    return f"k=affine:{key}:asym:scale=channel+v=affine:{value}:asym:scale=32+block=32"
