"""Codecs: one readable file per code family, reference math only. `CODECS` is the only list to edit.

A package of its own adds a codec through the entry point group ``kvslim.codecs`` (docs/extending.md).
"""

from __future__ import annotations

from kvslim.codecs.base import Codec
from kvslim.recipe import Side
from kvslim.registry import Registry, instantiate

CODECS = Registry(
    "codec",
    {
        "none": "kvslim.codecs.none:NoneCodec",
        "affine": "kvslim.codecs.affine:AffineCodec",
        "table": "kvslim.codecs.table:TableCodec",
        "fp4": "kvslim.codecs.microfloat:MicrofloatCodec",
        "float8": "kvslim.codecs.float8:Float8Codec",
        "qjl": "kvslim.codecs.qjl:QJLCodec",
        "outlier": "kvslim.codecs.outlier:OutlierCodec",
        "kvarn": "kvslim.codecs.kvarn:KVarNCodec",
        "equalize": "kvslim.codecs.equalize:EqualizeCodec",
    },
    group="kvslim.codecs",
    base="kvslim.codecs.base:Codec",
)


def build_codec(side: Side) -> Codec:
    """Instantiate a side's codec."""
    return instantiate(CODECS[side.codec.name], side.codec.name, side.codec.args)
