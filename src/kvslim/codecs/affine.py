"""affine: uniform codes with a scale, symmetric or with a zero point.

Symmetric    x ~ s * c            c in -(2^(b-1)-1) .. 2^(b-1)-1,   s = max|x| / (2^(b-1)-1)
Asymmetric   x ~ s * c + z        c in 0 .. 2^b-1,                  s = (max x - min x) / (2^b-1),  z = min x

over one of: a head and block (``scale=block``), a token (``scale=token``), ``scale=N`` channels of a token, or a channel of
a block (``scale=channel``: KIVI's keys, arXiv 2402.02750). Scales and zeros are fp16 and codes are chosen against the
stored, rounded ones, so that the rounding of a scale costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, check_group, grouped, token_layout
from kvslim.errors import RecipeError
from kvslim.layout import PackedLayout, Part
from kvslim.registry import choice

_TINY = 2.0**-24  # smallest fp16 step: a zero range becomes a scale that reproduces the constant through the zero point
_MAX = 65504.0


@dataclass(frozen=True)
class AffineCodec(Codec):
    """Uniform codes.

    Attributes
    ----------
    bits : int
        1 to 8 (symmetric codes need 2 or more).
    asym : bool
        With a zero point.
    scale : str
        ``block``, ``token``, ``channel`` or the number of channels per scale.
    """

    bits: int = choice(4, 1, 2, 3, 4, 5, 6, 7, 8)
    asym: bool = False
    scale: str = "token"

    def __post_init__(self) -> None:
        if self.scale not in ("block", "token", "channel") and not self.scale.isdigit():
            raise RecipeError(f"affine: scale={self.scale}; use block, token, channel or a number of channels")
        if not self.asym and self.bits < 2:
            raise RecipeError("affine: symmetric codes need bits >= 2; add asym or use 2 bits")
        if self.asym and self.scale == "block":
            raise RecipeError("affine: scale=block is symmetric; drop asym or use scale=channel")

    def _group(self, head_dim: int) -> int:
        return int(self.scale) if self.scale.isdigit() else head_dim

    def layout(self, head_dim: int, block: int) -> PackedLayout:
        group = self._group(head_dim)
        check_group("affine", group, head_dim)
        if self.scale == "block":
            parts = [Part("block", (1,), "fp16")]
        elif self.scale == "channel":
            parts = [Part("channel", (head_dim,), "fp16")]
            if self.asym:
                parts.append(Part("offset", (head_dim,), "fp16"))
        else:
            parts = [Part("token", (block, head_dim // group), "fp16")]
            if self.asym:
                parts.append(Part("zero", (block, head_dim // group), "fp16"))
        stored_group = 0 if self.scale in ("block", "channel") else group
        return token_layout(head_dim, block, self.bits, stored_group, tuple(parts))

    def table(self) -> torch.Tensor:
        codes = torch.arange(2**self.bits, dtype=torch.float32)
        return codes if self.asym else codes - (2 ** (self.bits - 1) - 1)

    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.scale == "block":
            values, over = x, (-2, -1)
        elif self.scale == "channel":
            values, over = x, (-2,)
        else:
            values, over = grouped(x, self._group(x.shape[-1])), (-1,)
        scale, zero = self._fit(values, over)
        top = 2**self.bits - 1 if self.asym else 2**self.bits - 2
        centre = 0 if self.asym else 2 ** (self.bits - 1) - 1
        codes = torch.round((values - zero.float()) / scale.float()) + centre
        codes = codes.clamp_(0, top).to(torch.uint8).reshape(x.shape)
        parts = {"code": pack(codes, self.bits)}
        if self.scale == "block":
            parts["block"] = scale.flatten(-2)
        elif self.scale == "channel":
            parts["channel"] = scale.squeeze(-2)
            if self.asym:
                parts["offset"] = zero.squeeze(-2)
        else:
            parts["token"] = scale.squeeze(-1)
            if self.asym:
                parts["zero"] = zero.squeeze(-1)
        return parts

    def _fit(self, values: torch.Tensor, over: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Fp16 scale and zero over the axes `over`, which stay as size 1."""
        if not self.asym:
            scale = values.abs().amax(over, keepdim=True) / (2 ** (self.bits - 1) - 1)
            return scale.clamp(_TINY, _MAX).half(), torch.zeros_like(scale, dtype=torch.float16)
        low, high = values.amin(over, keepdim=True), values.amax(over, keepdim=True)
        zero = low.clamp(-_MAX, _MAX).half()
        # the range is counted from the stored zero, so that its rounding cannot push the top of the range out
        scale = (high - zero.float()) / (2**self.bits - 1)
        return scale.clamp(_TINY, _MAX).half(), zero
