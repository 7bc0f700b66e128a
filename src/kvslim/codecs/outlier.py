"""outlier: the first channels at one bit more than the rest, as two independent instances (TurboQuant's 2.5, 3.5 bits).

    x[t, c < n]  ~ token[t,0] * LLOYD(b+1)[code]        x[t, c >= n] ~ token[t,1] * LLOYD(b)[code]

Each part has its own norm and table (arXiv 2504.19874, section 4). Which channels come first is the business of the
transform of the same name; each part is rotated on its own (``outlier/rotate:parts=32``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack, packed_width
from kvslim.codecs.base import Codec, nearest
from kvslim.codecs.levels import levels
from kvslim.codecs.scales import FITS, fit_ratio, normalised, to_fp16
from kvslim.errors import RecipeError
from kvslim.layout import PackedLayout, Part, Segment
from kvslim.registry import choice


@dataclass(frozen=True)
class OutlierCodec(Codec):
    """Two segments of Lloyd-Max codes.

    Attributes
    ----------
    bits : int
        1 to 7, of the channels after the first `count`; these take one bit more.
    count : int
        Outlier channels.
    fit : str
        How the stored scale follows from the codes, see scales.py.
    """

    bits: int = choice(3, 1, 2, 3, 4, 5, 6, 7)
    count: int = 32
    fit: str = choice("plain", *FITS)

    def _segments(self, head_dim: int) -> tuple[Segment, Segment]:
        rest = head_dim - self.count
        if self.count < 8 or self.count % 8 or rest < 8:
            raise RecipeError(
                f"outlier: count={self.count} of head_dim={head_dim} channels; use a multiple of 8 that leaves 8"
            )
        return Segment(self.count, self.bits + 1, self.count), Segment(rest, self.bits, rest)

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        segments = self._segments(head_dim)
        width = sum(packed_width(segment.width, segment.bits) for segment in segments)
        return PackedLayout(
            head_dim, block, segments, (Part("code", (block, width), "u8"), Part("token", (block, 2), "fp16"))
        )

    @override
    def table(self) -> torch.Tensor:
        return torch.cat((levels("lloyd", self.bits + 1), levels("lloyd", self.bits)))

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        segments = self._segments(x.shape[-1])
        code, token = [], []
        for segment, values in zip(segments, x.split([segment.width for segment in segments], dim=-1), strict=True):
            table = levels("lloyd", segment.bits).to(x.device)
            z, r = normalised(values)
            codes = nearest(z, table)
            code.append(pack(codes, segment.bits))
            token.append(to_fp16(r * fit_ratio(z, table[codes.int()], self.fit)))
        return {"code": torch.cat(code, dim=-1), "token": torch.cat(token, dim=-1)}
