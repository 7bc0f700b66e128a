"""Codecs: one readable file per code family, reference math only. `CODECS` is the only list to edit."""

from __future__ import annotations

from kvslim.codecs.base import Codec
from kvslim.recipe import Side
from kvslim.registry import Registry, instantiate

CODECS = Registry(
    "codec",
    {
        "none": "kvslim.codecs.none:NoneCodec",
        "affine": "kvslim.codecs.affine:AffineCodec",
    },
)


def build_codec(side: Side) -> Codec:
    """Instantiate a side's codec."""
    return instantiate(CODECS[side.codec.name], side.codec.name, side.codec.args)
