"""Transforms: invertible maps that move K or V into a basis that packs better."""

from __future__ import annotations

from kvslim.recipe import Side
from kvslim.registry import Registry, instantiate
from kvslim.transforms.base import Transform

TRANSFORMS = Registry(
    "transform",
    {
        "center": "kvslim.transforms.center:Center",
        "balance": "kvslim.transforms.balance:Balance",
        "rotate": "kvslim.transforms.rotate:Rotate",
        "outlier": "kvslim.transforms.outlier:Outlier",
    },
    group="kvslim.transforms",
    base="kvslim.transforms.base:Transform",
)


def build_transforms(side: Side) -> tuple[Transform, ...]:
    """Instantiate a side's transforms in the order they are applied."""
    return tuple(instantiate(TRANSFORMS[step.name], step.name, step.args) for step in side.transforms)
