"""fp4: E2M1 codes {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign bit, in small groups with one-byte float scales.

``scale=e8m0``   UltraQuant's form (arXiv 2606.20474): per 32 channels a power of two 2^e with
                 e = floor(log2(c * absmax) + 0.5). c = 0.156 is published; 0.20 is the optimum after the snap to a
                 power of two (MSE / 1.4).
``scale=e4m3``   NVFP4: per 16 channels an E4M3 scale absmax / 6 under one fp32 scale per block and head. ``fourorsix``
                 lets each group put its largest magnitude on 6 or on 4, whichever errs less (MSE - 16 %).

Codes are nearest by midpoints, ties towards zero. A group that is zero or not finite has scale byte 0 and codes 0. The
packing order of codes is bitpack.py's, not the published low nibble = even element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, check_group, grouped, nearest, token_layout
from kvslim.codecs.scales import total
from kvslim.errors import RecipeError
from kvslim.layout import FLOAT8, PackedLayout, Part
from kvslim.registry import choice

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = {"e8m0": 32, "e4m3": 16}
_E4M3_MAX = 448.0
_E4M3_HALF = 256.0  # what the largest scale is put on where a group may still ask for 6/4 of it
_SQRT2 = 2.0**0.5


@dataclass(frozen=True)
class MicrofloatCodec(Codec):
    """Four-bit floats.

    Attributes
    ----------
    scale : str
        ``e8m0`` (power of two) or ``e4m3`` (with a block scale).
    group : int
        Channels per scale; 0 is the format's own, 32 or 16.
    c : float
        Where e8m0 puts the largest magnitude: 0.156 published, 0.20 best.
    fourorsix : bool
        e4m3 only: choose per group between 6 and 4 as the place of the largest magnitude.
    """

    scale: str = choice("e8m0", "e8m0", "e4m3")
    group: int = 0
    c: float = 0.156
    fourorsix: bool = False

    def __post_init__(self) -> None:
        if not 0.1 <= self.c <= 0.3:
            raise RecipeError(f"fp4: c={self.c}; use 0.1 to 0.3 (0.156 as published, 0.20 for the least error)")
        if self.fourorsix and self.scale != "e4m3":
            raise RecipeError("fp4: fourorsix needs scale=e4m3; a power of two cannot choose between 4 and 6")

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        group = self.group or _GROUP[self.scale]
        check_group("fp4", group, head_dim)
        parts = [Part("token", (block, head_dim // group), self.scale)]
        if self.scale == "e4m3":
            parts.append(Part("block", (1,), "fp32"))
        return token_layout(head_dim, block, 4, group, tuple(parts))

    @override
    def table(self) -> torch.Tensor:
        positive = torch.tensor(_MAGNITUDES, dtype=torch.float32)
        return torch.cat((positive, -positive))

    @property
    def peak_factor(self) -> float:
        """What a group's largest magnitude is taken times before its exponent (e8m0), or a block's over (e4m3)."""
        if self.scale == "e8m0":
            return self.c * _SQRT2  # floor(log2(v) + 0.5) = floor(log2(v * sqrt 2)), the exponent of v * sqrt 2
        return 6 * (_E4M3_HALF if self.fourorsix else _E4M3_MAX)

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        values = grouped(x, self.group or _GROUP[self.scale])
        if self.scale == "e8m0":
            token = power_of_two(values.abs().amax(-1, keepdim=True), self.peak_factor)
            codes, _ = _coded(values, token.view(FLOAT8["e8m0"]).float(), token > 0)
            return {"code": pack(codes.flatten(-2), 4), "token": token.squeeze(-1)}
        block = self._block_scale(values)
        codes, token = self._best(values / block[..., None])
        return {"code": pack(codes.flatten(-2), 4), "token": token.squeeze(-1), "block": block.flatten(-2)}

    def _block_scale(self, values: torch.Tensor) -> torch.Tensor:
        """Fp32 scale that puts the block's largest group scale near the top of E4M3; ``[B, G, 1, 1]``."""
        peak = torch.nan_to_num(values.abs(), nan=0.0, posinf=0.0).amax((-3, -2, -1))
        block = peak / self.peak_factor
        return torch.where(block > 0, block, torch.ones_like(block))[..., None, None].clamp_min(2.0**-120)

    def _best(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and E4M3 scale bytes of values in units of the block scale."""
        codes, token, error = _topped(values, 6.0)
        if self.fourorsix:
            codes4, token4, error4 = _topped(values, 4.0)
            codes = torch.where(error4 < error, codes4, codes)
            token = torch.where(error4 < error, token4, token)
        return codes, token


def _topped(values: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, E4M3 scale byte and squared error of groups whose largest magnitude is put on `top`."""
    peak = values.abs().amax(-1, keepdim=True)
    token = torch.where(peak.isfinite(), peak / top, torch.zeros_like(peak)).clamp(max=_E4M3_MAX).to(FLOAT8["e4m3"])
    codes, error = _coded(values, token.float(), token.float() > 0)
    return codes, token.view(torch.uint8), error


def power_of_two(peak: torch.Tensor, factor: float) -> torch.Tensor:
    """E8M0 byte of 2^floor(log2(factor * peak)), without a logarithm; 0 where `peak` is 0 or not finite."""
    scaled = peak * factor
    _, exponent = torch.frexp(scaled)  # mantissa in [0.5, 1)
    byte = (exponent - 1 + 127).clamp(0, 254)
    valid = peak.isfinite() & (scaled > 0)
    return torch.where(valid, byte, torch.zeros_like(byte)).to(torch.uint8)


def _coded(values: torch.Tensor, scale: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes against a decoded scale ``[..., 1]``, 0 where not `valid`; also the squared error of each group."""
    z = torch.where(valid, values / torch.where(valid, scale, torch.ones_like(scale)), torch.zeros_like(values))
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=values.device)
    codes = nearest(z.abs(), magnitudes)
    error = total(((magnitudes[codes.int()] - z.abs()) * scale).square())
    return codes + (z < 0).to(torch.uint8) * 8, error
