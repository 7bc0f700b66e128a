"""none: values kept as they are, in a 16-bit float (or the model's own dtype). The control for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.codecs.base import Codec
from kvslim.layout import RAW_BITS, STORAGE, PackedLayout, Part, Segment
from kvslim.registry import choice


@dataclass(frozen=True)
class NoneCodec(Codec):
    """Identity: ``code`` is the value itself.

    Attributes
    ----------
    dtype : str
        ``fp16``, ``bf16`` or ``fp32``. The cache sets it to the model's dtype.
    """

    dtype: str = choice("fp16", "fp16", "bf16", "fp32")

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        bits = 32 if self.dtype == "fp32" else RAW_BITS
        return PackedLayout(head_dim, block, (Segment(head_dim, bits),), (Part("code", (block, head_dim), self.dtype),))

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"code": x.to(STORAGE[self.dtype])}
