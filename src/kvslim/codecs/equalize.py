"""equalize: blockwise variance equalization: channel means and deviations per block and head, clipped uniform codes.

    x[t,c] ~ offset[c] + channel[c] * (code[t,c] - (2^b - 1)/2)
    offset = mean_t x[.,c],   channel = std_t x[.,c] * 2 limit / (2^b - 1)

`limit` is one clip per block and head, searched on the equalized values (clip.py). Statistics are fp16; the deviation
is taken about the stored, rounded mean, and codes are chosen against the stored scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, token_layout
from kvslim.codecs.clip import CLIPS, clip_limit, uniform_codes
from kvslim.codecs.scales import TINY, to_fp16, total
from kvslim.layout import PackedLayout, Part
from kvslim.registry import choice


@dataclass(frozen=True)
class EqualizeCodec(Codec):
    """Uniform codes of equalized channels.

    Attributes
    ----------
    bits : int
        1 to 8.
    clip : str
        ``none``, ``percentile``, ``minimax`` or ``mse``.
    """

    bits: int = choice(4, 1, 2, 3, 4, 5, 6, 7, 8)
    clip: str = choice("mse", *CLIPS)

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        parts = (Part("channel", (head_dim,), "fp16"), Part("offset", (head_dim,), "fp16"))
        return token_layout(head_dim, block, self.bits, 0, parts)

    @override
    def table(self) -> torch.Tensor:
        return torch.arange(2**self.bits, dtype=torch.float32) - (2**self.bits - 1) / 2

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        offset = to_fp16(total(x, -2) / x.shape[-2])
        residual = x - offset.float()
        deviation = (total(residual.square(), -2) / x.shape[-2]).sqrt()
        limit = clip_limit(residual / deviation.clamp_min(TINY), self.bits, self.clip)
        channel = to_fp16(deviation * limit * (2 / (2**self.bits - 1)))
        codes = uniform_codes(residual, channel.float().clamp_min(TINY), self.bits).to(torch.uint8)
        return {"code": pack(codes, self.bits), "channel": channel.squeeze(-2), "offset": offset.squeeze(-2)}
