"""GGMLLayer: llama.cpp's q4_0 and q8_0 as a cache layer of transformers, for comparison only.

Bytes are those of `gguf.quants`, which a test compares: groups of 32 along the head, one fp16 scale each, for q4_0 the
first half of a group in the low nibbles. Every token is packed as it comes, as llama.cpp does; the chunk itself is
attended to as packed, and the whole layer is decoded at every step, which llama.cpp does not do.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvslim.errors import InputError

GROUP = 32


class GGMLLayer(DynamicLayer):
    """A growing layer in blocks of ggml.

    Parameters
    ----------
    kind : str
        "q4_0" or "q8_0".
    """

    is_croppable = False

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.packed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = (quantize(key_states, self.kind), quantize(value_states, self.kind))
        old = self.packed
        self.packed = new if old is None else (torch.cat([old[0], new[0]], dim=-2), torch.cat([old[1], new[1]], dim=-2))
        self._length += key_states.shape[-2]
        dtype = key_states.dtype
        return dequantize(self.packed[0], self.kind).to(dtype), dequantize(self.packed[1], self.kind).to(dtype)

    def get_seq_length(self) -> int:
        return self._length

    def reset(self) -> None:
        super().reset()
        self.packed, self._length = None, 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.packed is not None:
            self.packed = (self.packed[0].index_select(0, beam_idx), self.packed[1].index_select(0, beam_idx))


def quantize(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Blocks of ggml: (..., head_dim) to uint8 (..., bytes); 18 bytes per 32 values for q4_0, 34 for q8_0.

    Raises
    ------
    InputError
        The head_dim is no multiple of 32.
    """
    if x.shape[-1] % GROUP:
        raise InputError(f"head_dim={x.shape[-1]} is no multiple of {GROUP}, which {kind} needs; use another peer")
    groups = x.float().unflatten(-1, (-1, GROUP))
    if kind == "q4_0":
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = largest / -8
        codes = (groups * _inverse(scale) + 8.5).to(torch.uint8).clamp(max=15)
        low, high = codes.chunk(2, dim=-1)
        codes = low | (high << 4)
    else:
        scale = groups.abs().amax(-1, keepdim=True) / 127
        scaled = groups * _inverse(scale)
        # halves away from zero, as ggml rounds; torch.round would take them to even
        codes = (scaled.sign() * (scaled.abs() + 0.5).floor()).to(torch.int8).view(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), codes], dim=-1).flatten(-2)


def dequantize(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Undo `quantize`; float32."""
    width = 2 + (GROUP // 2 if kind == "q4_0" else GROUP)
    groups = blocks.unflatten(-1, (-1, width))
    scale = groups[..., :2].contiguous().view(torch.float16).float()
    codes = groups[..., 2:]
    if kind == "q4_0":
        values = torch.cat([codes & 15, codes >> 4], dim=-1).float() - 8
    else:
        values = codes.contiguous().view(torch.int8).float()
    return (scale * values).flatten(-2)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)
