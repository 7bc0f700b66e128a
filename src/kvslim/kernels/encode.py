"""Which code encodes: the native encoder where there is one, the reference otherwise. Same bytes either way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvslim.codecs.side import Frozen, SidePacker
from kvslim.kernels.cpu import encoder
from kvslim.kernels.cpu.library import native
from kvslim.layout import PackedBlock


def encode(
    packer: SidePacker,
    x: torch.Tensor,
    frozen: Frozen,
    starts: torch.Tensor,
    earlier: Sequence[tuple[PackedBlock, int]] = (),
) -> PackedBlock:
    """Encode tokens of shape (blocks, kv_heads, tokens, head_dim), in any float dtype, as the model made them.

    Parameters
    ----------
    packer : SidePacker
    x : Tensor
    frozen : Frozen
    starts : Tensor of shape (blocks,), int64
        Position of each block's first slot.
    earlier : sequence of (PackedBlock, int)
        Blocks before these and their valid tokens, as many as `packer.codec.earlier_blocks`; read by the reference
        alone, since no codec that looks back has a native encoder.
    """
    library = native() if x.device.type == "cpu" and not encoder.refusal(packer, frozen) else None
    if library is None:
        return packer.encode(x.float(), frozen, starts, earlier)
    return encoder.encode(library, packer, x, frozen, starts)
