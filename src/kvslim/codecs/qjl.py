"""qjl: TurboQuant's inner-product form (arXiv 2504.19874, `prod`): b-1 bits of table codes, one of residual signs.

    r = x - s y,   x ~ s y + sqrt(pi/2)/D * ||r|| * S^T sign(S r),   S Gaussian D x D, fixed by a seed

is an unbiased estimate of x under the draw of S, at five times the error variance of b bits of table codes. The signs
are a second segment of D one-bit channels with ||r|| as their token scale, so the packed form is read as always;
queries gain the channels S q * sqrt(pi/2)/D, and of the summed values the second half is mapped back by S^T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from typing_extensions import override

from kvslim.bitpack import pack, packed_width
from kvslim.codecs.base import Codec, nearest
from kvslim.codecs.levels import levels
from kvslim.codecs.scales import fit_ratio, normalised, root, to_fp16, total
from kvslim.layout import PackedLayout, Part, Segment
from kvslim.registry import choice
from kvslim.transforms.dense import gaussian, row_product

_SEED = 20240606  # part of the byte format: caches on disk were written with this S


@dataclass(frozen=True)
class QJLCodec(Codec):
    """Lloyd-Max codes and a sign sketch of their residual.

    Attributes
    ----------
    bits : int
        2 to 8, the sign bit included.
    fit : str
        Scale of the table codes, see scales.py.
    """

    bits: int = choice(4, 2, 3, 4, 5, 6, 7, 8)
    fit: str = choice("plain", "plain", "ls")

    @property
    @override
    def mse_bound(self) -> float:
        return min(0.9, 32 * 4.0**-self.bits)  # pi/2 of what codes of one bit less leave

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        width = packed_width(head_dim, self.bits - 1) + packed_width(head_dim, 1)
        segments = (Segment(head_dim, self.bits - 1, head_dim), Segment(head_dim, 1, head_dim))
        parts = (Part("code", (block, width), "u8"), Part("token", (block, 2), "fp16"))
        return PackedLayout(head_dim, block, segments, parts)

    @override
    def table(self) -> torch.Tensor:
        return torch.cat((levels("lloyd", self.bits - 1), torch.tensor([-1.0, 1.0])))

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        table = levels("lloyd", self.bits - 1).to(x.device)
        z, r = normalised(x)
        codes = nearest(z, table)
        y = table[codes.int()]
        scale = to_fp16(r * fit_ratio(z, y, self.fit))
        residual = x - scale.float() * y
        signs = (row_product(residual, sketch(x.shape[-1], str(x.device), torch.float64).T) > 0).to(torch.uint8)
        norm = to_fp16(root(total(residual.square())))
        code = torch.cat((pack(codes, self.bits - 1), pack(signs, 1)), dim=-1)
        return {"code": code, "token": torch.cat((scale, norm), dim=-1)}

    @override
    def expand_query(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat((query, query @ query_sketch(query.shape[-1], str(query.device))), dim=-1)

    @override
    def reduce_output(self, acc: torch.Tensor) -> torch.Tensor:
        direct, signs = acc.chunk(2, dim=-1)
        return direct + signs @ query_sketch(direct.shape[-1], str(acc.device)).T


def query_sketch(head_dim: int, device: str) -> torch.Tensor:
    """S^T sqrt(pi/2)/D of shape (head_dim, head_dim), fp32: queries times it meet the signs."""
    return sketch(head_dim, device, torch.float32).T * (math.sqrt(math.pi / 2) / head_dim)


@lru_cache(maxsize=16)
def sketch(head_dim: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """S of shape (head_dim, head_dim), shared by every cache of the process."""
    return gaussian(head_dim, head_dim, _SEED).to(device, dtype)
