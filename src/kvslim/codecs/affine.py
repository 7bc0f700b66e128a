"""affine: uniform codes with a scale, symmetric or with a zero point.

Symmetric    x ~ s * c            c in -(2^(b-1)-1) .. 2^(b-1)-1,   s = max|x| / (2^(b-1)-1)
Asymmetric   x ~ s * c + z        c in 0 .. 2^b-1,                  s = (max x - min x) / (2^b-1),  z = min x

over one of: a head and block (``scale=block``), a token (``scale=token``), ``scale=N`` channels of a token, or a
channel of a block (``scale=channel``: KIVI's keys, arXiv 2402.02750). Scales and zeros are fp16 and codes are chosen
against the stored, rounded ones, so that the rounding of a scale costs nothing. ``feedback`` carries rounding errors
into the channels not yet coded (see feedback.py); the scales are found before that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, check_group, group_of, grouped, token_layout
from kvslim.codecs.feedback import code_with_feedback, to_columns
from kvslim.codecs.scales import LARGEST, TINY, asymmetric_range, range_error
from kvslim.errors import RecipeError
from kvslim.layout import PackedLayout, Part
from kvslim.registry import choice

_OVER: dict[str, tuple[int, ...]] = {"block": (-2, -1), "channel": (-2,)}  # axes that share a scale


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
    feedback : bool
        Carry rounding errors while writing; needs scales per token.
    """

    bits: int = choice(4, 1, 2, 3, 4, 5, 6, 7, 8)
    asym: bool = False
    scale: str = "token"
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.scale not in ("block", "token", "channel") and not self.scale.isdigit():
            raise RecipeError(f"affine: scale={self.scale}; use block, token, channel or a number of channels")
        if not self.asym and self.bits < 2:
            raise RecipeError("affine: symmetric codes need bits >= 2; add asym or use 2 bits")
        if self.asym and self.scale == "block":
            raise RecipeError("affine: scale=block is symmetric; drop asym or use scale=channel")
        if self.feedback and self.scale in ("block", "channel"):
            raise RecipeError(f"affine: feedback needs scales per token, got scale={self.scale}; use token or a number")

    @property
    @override
    def needs_queries(self) -> bool:
        return self.feedback

    @property
    @override
    def mse_bound(self) -> float:
        return range_error(2**self.bits - (1 if self.asym else 2))

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        group = group_of(self.scale, head_dim)
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

    @override
    def table(self) -> torch.Tensor:
        codes = torch.arange(2**self.bits, dtype=torch.float32)
        return codes if self.asym else codes - (2 ** (self.bits - 1) - 1)

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        values, over = x, _OVER.get(self.scale, (-1,))
        if self.scale not in _OVER:
            values = grouped(x, group_of(self.scale, x.shape[-1]))
        scale, zero = self._fit(values, over)
        if self.feedback and feedback is not None:
            codes = self._carried(x, scale.float().squeeze(-1), zero.float().squeeze(-1), feedback)
        else:
            codes = self._codes(values, scale.float(), zero.float()).to(torch.uint8).reshape(x.shape)
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

    @property
    def _centre(self) -> int:
        """Code of the value at the zero point, or of 0."""
        return 0 if self.asym else 2 ** (self.bits - 1) - 1

    def _codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        top = 2**self.bits - 1 if self.asym else 2**self.bits - 2
        return (torch.round((values - zero) / scale) + self._centre).clamp_(0, top)

    def _carried(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Codes of x [B, G, T, D] with feedback, under scales and zeros [B, G, T, groups]."""
        scales, zeros, group = to_columns(scale), to_columns(zero), group_of(self.scale, x.shape[-1])

        def quantize(j: int, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scale, zero = scales[j // group], zeros[j // group]
            codes = self._codes(column, scale, zero)
            return codes.to(torch.uint8), scale * (codes - self._centre) + zero

        return code_with_feedback(x, factor, quantize)[0]

    def _fit(self, values: torch.Tensor, over: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Fp16 scale and zero over the axes `over`, which stay as size 1."""
        if not self.asym:
            scale = values.abs().amax(over, keepdim=True) / (2 ** (self.bits - 1) - 1)
            return scale.clamp(TINY, LARGEST).half(), torch.zeros_like(scale, dtype=torch.float16)
        low, high = values.amin(over, keepdim=True), values.amax(over, keepdim=True)
        return asymmetric_range(low, high, 2**self.bits - 1)
