"""Compilations of the append kernel: every form that a preset's side has, at every head_dim."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from kvslim.codecs.side import SidePacker
from kvslim.errors import RecipeError
from kvslim.kernels.triton.append import append
from kvslim.kernels.triton.append_form import AppendForm, NoAppendFormError, append_form
from kvslim.kernels.triton.encoder import COMPILER, constants
from kvslim.kernels.triton.targets import Target
from kvslim.kernels.triton.variant import HEAD_DIMS, Variant
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe, Side
from kvslim.transforms.base import Sample

_POINTERS = {
    "X": "*bf16",
    "CODE": "*u8",
    "ZERO": "*fp16",
    "SCALE": "*fp16",
    **dict.fromkeys(("P", "MATRIX", "PAGES", "SUMS", "FACTOR", "DIAGONAL", "EDGES", "LEVELS", "MULTIPLES"), "*fp32"),
}
_NUMBERS = {
    **dict.fromkeys(("heads", "count", "x_block", "x_head", "x_token", "p_step", "p_head", "row"), "i32"),
    "scale_by": "fp32",
}


def variants(target: Target) -> Iterator[Variant]:
    """All compilations of the append kernel for one target."""
    for form, layout in forms().items():
        constexprs = constants(form, target.warp_size)
        types = {**_POINTERS, **_NUMBERS, **dict.fromkeys(constexprs, "constexpr")}
        if form.codec == "e2m1":
            types |= {"SCALE": "*u8", "ZERO": "*fp32"}
        yield Variant(
            kernel="append",
            head_dim=form.d,
            layout=layout,
            fn=append,
            signature={name: types[name] for name in append.arg_names},
            constexprs=constexprs,
            options=COMPILER,
        )


@lru_cache(maxsize=1)
def forms() -> dict[AppendForm, str]:
    """Every form, with the first preset that has it: ``slim4 v``, or ``int8`` where both sides are alike."""
    found: dict[AppendForm, str] = {}
    for head_dim in HEAD_DIMS:
        for name in PRESETS:
            recipe = Recipe.parse(name)
            for letter, side in (("k", recipe.key), ("v", recipe.value)):
                label = name if recipe.key == recipe.value else f"{name} {letter}"
                form = _form(side, head_dim, recipe.block)
                if form is not None:
                    found.setdefault(form, label)
    return found


def _form(side: Side, head_dim: int, block: int) -> AppendForm | None:
    try:
        packer = SidePacker(side, head_dim, block, "fp16")
        return append_form(packer, packer.freeze(_sample(head_dim, block)))
    except (RecipeError, NoAppendFormError):  # not at this head_dim, or in torch only
        return None


def _sample(head_dim: int, block: int) -> Sample:
    """What any side can be frozen on; its numbers do not matter."""
    half = torch.arange(head_dim // 2)
    prior = {
        "plain_mean": torch.zeros(1, head_dim),
        "rope_pairs": torch.stack((half, half + head_dim // 2)),
        "rope_frequency": torch.ones(head_dim // 2, dtype=torch.float64),
    }
    return Sample(torch.ones(1, block, head_dim), torch.eye(head_dim)[None], block, block, prior)
