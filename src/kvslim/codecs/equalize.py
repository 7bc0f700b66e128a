"""equalize: blockwise variance equalization: channel means and deviations per block and head, clipped uniform codes.

    x[t,c] ~ offset[c] + channel[c] * (code[t,c] - (2^b - 1)/2)
    offset = mean_t x[.,c],   channel = std_t x[.,c] * 2 limit / (2^b - 1)

`limit` is one clip per block and head, searched on the equalized values (clip.py). Statistics are fp16; the deviation
is taken about the stored, rounded mean, and codes are chosen against the stored scale.

Temporally adaptive forms draw the statistics from blocks before this one too, as their packed bytes give them back:
``window=N`` over this block and N - 1 before it (sliding window), ``predict`` over the N before it and not over its own
tokens. The first block of a sequence has its own statistics alone. The bytes have the same form, and do not depend on
how the prompt was cut, since sealed blocks never change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, token_layout
from kvslim.codecs.clip import CLIPS, clip_limit, uniform_codes
from kvslim.codecs.scales import TINY, range_error, root, to_fp16, total
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
    window : int
        Blocks that the statistics are drawn from, 1 to 8.
    predict : bool
        From the blocks before this one only.
    """

    bits: int = choice(4, 1, 2, 3, 4, 5, 6, 7, 8)
    clip: str = choice("mse", *CLIPS)
    window: int = choice(1, 1, 2, 3, 4, 5, 6, 7, 8)
    predict: bool = False

    @property
    @override
    def earlier_blocks(self) -> int:
        return self.window if self.predict else self.window - 1

    @property
    @override
    def mse_bound(self) -> float:
        return range_error(2**self.bits - 1)

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        parts = (Part("channel", (head_dim,), "fp16"), Part("offset", (head_dim,), "fp16"))
        return token_layout(head_dim, block, self.bits, 0, parts)

    @override
    def table(self) -> torch.Tensor:
        return torch.arange(2**self.bits, dtype=torch.float32) - (2**self.bits - 1) / 2

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return self._encode(x, x)

    @override
    def encode_after(self, x: torch.Tensor, earlier: torch.Tensor) -> dict[str, torch.Tensor]:
        if not earlier.shape[-2]:
            return self.encode(x)
        return self._encode(x, earlier if self.predict else torch.cat((earlier, x), dim=-2))

    def _encode(self, x: torch.Tensor, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode x under the means and deviations of `sample`."""
        tokens = sample.shape[-2]
        offset = to_fp16(total(sample, -2) / tokens)
        deviation = root(total((sample - offset.float()).square(), -2) / tokens)
        residual = x - offset.float()
        limit = clip_limit(residual / deviation.clamp_min(TINY), self.bits, self.clip)
        channel = to_fp16(deviation * limit * (2 / (2**self.bits - 1)))
        codes = uniform_codes(residual, channel.float().clamp_min(TINY), self.bits).to(torch.uint8)
        return {"code": pack(codes, self.bits), "channel": channel.squeeze(-2), "offset": offset.squeeze(-2)}
