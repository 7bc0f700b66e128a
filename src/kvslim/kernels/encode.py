"""Which code encodes: a native encoder where there is one, the reference otherwise. Same bytes either way.

With one exception, stated in kernels/triton/append.py: random rotations on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvslim.codecs.side import Frozen, SidePacker
from kvslim.kernels.cpu import encoder
from kvslim.kernels.cpu.library import native, why_not
from kvslim.kernels.triton.device import device_target
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
    if refusal(packer, frozen, x.device):
        return packer.encode(x.float(), frozen, starts, earlier)
    if x.device.type == "cpu":
        library = native()
        assert library is not None
        return encoder.encode(library, packer, x, frozen, starts)
    from kvslim.kernels.triton import encoder as gpu

    return gpu.encode(packer, x, frozen, starts)


def refusal(packer: SidePacker, frozen: Frozen, device: torch.device) -> str:
    """Why the reference encodes on `device`; empty if a native encoder does."""
    if device.type == "cpu":
        return why_not() if native() is None else encoder.refusal(packer, frozen)
    target = device_target(device)
    if isinstance(target, str):
        return target
    from kvslim.kernels.triton import encoder as gpu  # imports triton

    return gpu.refusal(packer, frozen)


def explain(packer: SidePacker, frozen: Frozen, device: torch.device) -> tuple[str, str]:
    """Name of what encodes a side on `device`, and why it is the reference where it is."""
    why = refusal(packer, frozen, device)
    if why:
        return "reference", why
    library = native() if device.type == "cpu" else None
    return "triton" if library is None else f"native {library.isa}", ""
