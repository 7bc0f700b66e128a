"""Compilations of the attention kernels: every pair of forms that a preset has, at every head_dim."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from kvslim.codecs.side import SidePacker
from kvslim.errors import RecipeError
from kvslim.kernels.triton.attend import attend_shares, merge_shares
from kvslim.kernels.triton.configs import FAMILIES, compiler_options, config
from kvslim.kernels.triton.form import SideForm, power_of_two, side_form
from kvslim.kernels.triton.reader import constants
from kvslim.kernels.triton.targets import Target
from kvslim.kernels.triton.variant import HEAD_DIMS, Variant
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

_GROUP = 4  # query heads per kv head
_HEADS = {"KV_HEADS": 8, "GROUP": _GROUP}
_PLAIN = {"MASK_KIND": "none", "CAUSAL": True, "SOFTCAP": False, "PAGES": False}
_CHUNK = 128  # query rows of the variant for chunks
_STRIDES = tuple(f"{name}_{axis}" for name in ("query", "key", "value") for axis in "bht")
_POINTERS = {
    **dict.fromkeys(("EXACT_QUERY", "STORED_KEY", "STORED_VALUE", "CHUNK_KEY", "CHUNK_VALUE"), "*bf16"),
    **dict.fromkeys(("FACTOR", "BIAS", "PAGE", "SUM", "STATE", "SINKS", "PACKED", "MASS", "EXACT"), "*fp32"),
    **dict.fromkeys(("KEY_TABLE", "VALUE_TABLE"), "*fp16"),
    **dict.fromkeys(("BLOCKS", "ROWS", "HOLES"), "*i32"),
    "ADDRESSES": "*i64",
    "MASK": "*u8",
    "scaling": "fp32",
    "softcap": "fp32",
}


def variants(target: Target) -> Iterator[Variant]:
    """All compilations of the attention kernels for one target."""
    for (head_dim, key, value), layout in forms(
        FAMILIES[target.family].arithmetic, FAMILIES[target.family].widest
    ).items():
        for rows, suffix in ((_GROUP, ""), (_CHUNK, " chunk")):
            yield _attend(target, head_dim, layout + suffix, key, value, rows)
    for head_dim in HEAD_DIMS:
        lanes = power_of_two(head_dim)
        settings: dict[str, object] = {**_HEADS, "VALUE_DIM": head_dim, "LANES": lanes, "HAS_SINKS": True}
        options = {"num_warps": 4, "num_stages": 1}
        yield Variant("merge", head_dim, "sums", merge_shares, _signature(merge_shares, settings), settings, options)


@lru_cache(maxsize=2)
def forms(arithmetic: bool, widest: int) -> dict[tuple[int, SideForm, SideForm], str]:
    """Head_dim and forms of K and V, with the first preset that has them."""
    found: dict[tuple[int, SideForm, SideForm], str] = {}
    for head_dim in HEAD_DIMS:
        for name in PRESETS:
            recipe = Recipe.parse(name)
            try:
                packers = [SidePacker(side, head_dim, recipe.block, "bf16") for side in (recipe.key, recipe.value)]
            except RecipeError:  # not at this head_dim
                continue
            key, value = (
                side_form(packer.layout, packer.codec.table(), side, arithmetic=arithmetic, widest=widest)
                for packer, side in zip(packers, "kv", strict=True)
            )
            found.setdefault((head_dim, key, value), name)
    return found


def _attend(target: Target, head_dim: int, layout: str, key: SideForm, value: SideForm, rows: int) -> Variant:
    own = config(target.family, max(power_of_two(size) for size in (head_dim, key.width, value.width)), rows)
    settings = {**constants(target.family, own, (key, value), (head_dim, head_dim)), **_HEADS, **_PLAIN}
    signature = _signature(attend_shares, settings)
    signature |= {"QUERY": f"*{key.dot}", "REST": f"*{key.dot}"}
    return Variant(
        kernel="attend",
        head_dim=head_dim,
        layout=layout,
        fn=attend_shares,
        signature=signature,
        constexprs=settings,
        options=compiler_options(target.family, own),
        loop_elements=own.tokens * (key.width + value.width),
        multiples=_STRIDES,
    )


def _signature(kernel: JITFunction, constants: dict[str, object]) -> dict[str, str]:
    types = {**_POINTERS, **dict.fromkeys(constants, "constexpr")}
    return {name: types.get(name, "i32") for name in kernel.arg_names}
