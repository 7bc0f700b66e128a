"""Native encoder of the `table` codec, transforms included. Its bytes equal those of the reference, bit for bit."""

from __future__ import annotations

import ctypes

import torch

from kvslim.codecs.base import midpoints
from kvslim.codecs.feedback import carry_steps
from kvslim.codecs.levels import levels
from kvslim.codecs.scales import MULTIPLES
from kvslim.codecs.side import Frozen, SidePacker
from kvslim.codecs.table import NEARBY, TableCodec
from kvslim.kernels.cpu import abi
from kvslim.kernels.cpu.chain import NoNativeFormError, native_steps
from kvslim.kernels.cpu.library import Library
from kvslim.layout import STORAGE, PackedBlock

_FITS = {"plain": 0, "ls": 1, "search": 1, "norm": 2, "eden": 3}
_SMALL = 64  # token vectors below which waking another thread costs more than it saves


def refusal(packer: SidePacker, frozen: Frozen) -> str:
    """Why a frozen side has no native encoder; empty if it has one."""
    codec = packer.codec
    if type(codec) is not TableCodec:  # one derived from it may encode in its own way
        return f"codec {type(codec).__name__}"
    if codec.std or codec.scale != "token":
        return "table codes with " + ("std" if codec.std else f"scale={codec.scale}")
    try:
        kinds = native_steps(packer, frozen).kinds
    except NoNativeFormError as missing:
        return str(missing)
    return "a random orthogonal rotation" if abi.MATRIX in kinds else ""


def encode(library: Library, packer: SidePacker, x: torch.Tensor, frozen: Frozen, starts: torch.Tensor) -> PackedBlock:
    """Encode tokens of shape (blocks, kv_heads, tokens, head_dim), in any float dtype, as the model made them.

    For sides that `refusal` has nothing against.
    """
    codec, steps = packer.codec, native_steps(packer, frozen)
    assert isinstance(codec, TableCodec)
    x = x if x.stride(-1) == 1 else x.contiguous()
    blocks, heads, tokens, head_dim = x.shape
    parts = {
        part.name: torch.empty(
            (blocks, heads, *((tokens, *part.shape[1:]) if part.name in ("code", "token") else part.shape)),
            dtype=STORAGE[part.dtype],
        )
        for part in packer.layout.parts
    }
    table = levels(codec.kind, codec.bits)
    table = torch.cat((table, midpoints(table)))
    search = codec.fit == "search"
    inverse = [1 / multiple for multiple in MULTIPLES]
    nearby = NEARBY if search else ()
    multiples = (ctypes.c_float * (2 * len(MULTIPLES) + len(nearby)))(*MULTIPLES, *inverse, *nearby)
    call = abi.Encode(
        x=x.data_ptr(),
        x_dtype=abi.DTYPES[x.dtype],
        blocks=blocks,
        kv_heads=heads,
        tokens=tokens,
        head_dim=head_dim,
        bits=codec.bits,
        mean=codec.mean,
        by_range=codec.kind == "nf",
        fit=_FITS[codec.fit],
        search=search,
        step_count=len(steps.kinds),
        steps=steps.address,
        table=table.data_ptr(),
        multiples=ctypes.addressof(multiples),
        multiple_count=len(MULTIPLES),
        nearby_count=len(nearby),
    )
    call.x_block, call.x_head, call.x_token, _ = x.stride()
    page = frozen.chain.steps[0].offset(starts) if abi.PAGE in steps.kinds else None
    if page is not None:
        page = page.contiguous()
        call.page = page.data_ptr()
    factor = frozen.factor() if codec.feedback else None
    if factor is not None:
        carried, diagonal = carry_steps(factor)
        call.factor, call.diagonal = carried.data_ptr(), diagonal.data_ptr()
    for name, tensor in parts.items():
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"{name}_block", tensor.stride(0))
        setattr(call, f"{name}_head", tensor.stride(1))
    threads = torch.get_num_threads() if blocks * heads * tokens > _SMALL else 1
    if library.encode(ctypes.addressof(call), threads):
        raise MemoryError("the native encoder ran out of memory")
    return PackedBlock(packer.layout, parts)
