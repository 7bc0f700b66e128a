"""SidePacker: one side of one layer, transforms and codec together; Frozen: its parameters once they are known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvslim.codecs import build_codec
from kvslim.codecs.base import Codec
from kvslim.codecs.none import NoneCodec
from kvslim.layout import PackedBlock, PackedLayout
from kvslim.recipe import Side
from kvslim.transforms import build_transforms
from kvslim.transforms.base import Chain, Sample, Transform, fit_chain


@dataclass(frozen=True)
class Frozen:
    """Parameters of one side, frozen at the first seal and shared by forks.

    Attributes
    ----------
    chain : Chain
    table : Tensor of shape (entries,), fp32, or None
    feedback : Tensor of shape (kv_heads, head_dim, head_dim) or None
    """

    chain: Chain
    table: torch.Tensor | None
    feedback: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that this cache family owns, by name."""
        owned = dict(self.chain.tensors())
        if self.table is not None:
            owned["table"] = self.table
        if self.feedback is not None:
            owned["feedback"] = self.feedback
        return owned


class SidePacker:
    """How K or V of one layer is packed.

    Parameters
    ----------
    side : Side
    head_dim, block : int
    dtype : str
        The model's dtype name (``fp32`` ...); what ``none`` stores.
    """

    def __init__(self, side: Side, head_dim: int, block: int, dtype: str):
        self.side = side
        self.transforms: tuple[Transform, ...] = build_transforms(side)
        codec: Codec = build_codec(side)
        if isinstance(codec, NoneCodec) and not side.codec.args:
            codec = replace(codec, dtype=dtype)
        self.codec = codec
        self.layout: PackedLayout = codec.layout(head_dim, block)
        self.needs_queries = codec.needs_queries or any(transform.needs_queries for transform in self.transforms)

    def freeze(self, sample: Sample) -> Frozen:
        """Fit the transforms on `sample`."""
        chain = fit_chain(self.transforms, sample)
        table = self.codec.table()
        return Frozen(chain, None if table is None else table.to(sample.x.device))

    def encode(self, x: torch.Tensor, frozen: Frozen, starts: torch.Tensor | None = None) -> PackedBlock:
        """Encode tokens of shape (blocks, kv_heads, tokens, head_dim), fp32, as the model made them."""
        return PackedBlock(self.layout, self.codec.encode(frozen.chain.forward(x, starts), frozen.feedback))
