"""float8: 8-bit floats, E4M3 or E5M2, with an fp16 scale per token and head (never one for a whole stream).

    x[t,c] ~ token[t] * TABLE[code[t,c]]      token = max|x| / 1.75

TABLE is the format's value divided by a power of two, so that its largest entry is 1.75 and the scale stays well
inside fp16; dividing is exact, so a kernel may convert the byte natively and fold the power of two into the scale.
Codes are the format's own bytes. NaN and infinity are never produced; their table entries read 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, token_layout
from kvslim.codecs.scales import TINY, to_fp16
from kvslim.layout import PackedLayout, Part
from kvslim.registry import choice

_FORMATS = {"e4m3": (torch.float8_e4m3fn, 2.0**8), "e5m2": (torch.float8_e5m2, 2.0**15)}  # dtype, unit
_TOP = 1.75  # largest finite value of either format in its unit


@dataclass(frozen=True)
class Float8Codec(Codec):
    """8-bit floats.

    Attributes
    ----------
    kind : str
        ``e4m3`` or ``e5m2``.
    """

    kind: str = choice("e4m3", "e4m3", "e5m2")

    @property
    @override
    def mse_bound(self) -> float:
        return {"e4m3": 9e-4, "e5m2": 3.5e-3}[self.kind]  # a float spends bits on its range

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        return token_layout(head_dim, block, 8, head_dim, (Part("token", (block, 1), "fp16"),))

    @override
    def table(self) -> torch.Tensor:
        dtype, unit = _FORMATS[self.kind]
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float() / unit
        return torch.where(values.isfinite(), values, torch.zeros_like(values))

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        dtype, unit = _FORMATS[self.kind]
        token = to_fp16(x.abs().amax(-1, keepdim=True) / _TOP)
        z = (x / token.float().clamp_min(TINY)).clamp(-_TOP, _TOP) * unit
        return {"code": pack(z.to(dtype).view(torch.uint8), 8), "token": token}
