"""midrise: symmetric codes without a zero, x ~ s * (c - (2^b - 1) / 2), one fp16 scale per token."""

from dataclasses import dataclass

import torch

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, token_layout
from kvslim.codecs.scales import TINY, to_fp16
from kvslim.layout import PackedLayout, Part
from kvslim.registry import choice


@dataclass(frozen=True)
class MidriseCodec(Codec):
    """Uniform codes of `bits` bits whose two middle levels lie half a step from zero."""

    bits: int = choice(4, 2, 3, 4, 5, 6, 7, 8)

    def layout(self, head_dim: int, block: int) -> PackedLayout:
        return token_layout(head_dim, block, self.bits, head_dim, (Part("token", (block, 1), "fp16"),))

    def table(self) -> torch.Tensor:
        return torch.arange(2**self.bits, dtype=torch.float32) - (2**self.bits - 1) / 2

    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        top = (2**self.bits - 1) / 2
        token = to_fp16(x.abs().amax(-1, keepdim=True) / top)
        codes = torch.round(x / token.float().clamp_min(TINY) + top).clamp(0, 2 * top)
        return {"code": pack(codes.to(torch.uint8), self.bits), "token": token}
