"""Encoder on a GPU: hands a frozen side to the append kernel. Its bytes are those of the reference, see append.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvslim.codecs.base import midpoints
from kvslim.codecs.feedback import carry_steps
from kvslim.codecs.microfloat import MicrofloatCodec
from kvslim.codecs.scales import MULTIPLES
from kvslim.codecs.side import Frozen, SidePacker
from kvslim.codecs.table import NEARBY
from kvslim.kernels.triton.append import append, append_sums
from kvslim.kernels.triton.append_form import AppendForm, NoAppendFormError, append_form
from kvslim.layout import STORAGE, TOKEN_PARTS, PackedBlock
from kvslim.transforms.balance import Balanced
from kvslim.transforms.base import Fitted
from kvslim.transforms.center import Mean, PageMean
from kvslim.transforms.rotate import Rotation, rotation_matrix, sign_vector

WARPS = 4
# of triton's compiler; a product fused with a sum would round otherwise than the reference
COMPILER = {"num_warps": WARPS, "num_stages": 1, "enable_fp_fusion": False}
# of a tile that one thread holds; coding with feedback keeps five such tiles
_VALUES, _VALUES_WITH_FEEDBACK = 16, 8


@dataclass(frozen=True)
class Prepared:
    """What does not change between calls on one frozen side.

    Attributes
    ----------
    form : AppendForm
    vectors : Tensor of shape (steps, kv_heads or 1, head_dim), fp32
    matrix : Tensor of shape (head_dim, head_dim), fp32
    edges, levels, multiples : Tensor, fp32
    scale_by : float
        What E2M1 takes the largest magnitude times (e8m0), or a block's over (e4m3).
    """

    form: AppendForm
    vectors: torch.Tensor
    matrix: torch.Tensor
    edges: torch.Tensor
    levels: torch.Tensor
    multiples: torch.Tensor
    scale_by: float


_KNOWN: WeakKeyDictionary[Frozen, Prepared] = WeakKeyDictionary()


def refusal(packer: SidePacker, frozen: Frozen) -> str:
    """Why the kernel cannot encode a frozen side; empty if it can."""
    try:
        append_form(packer, frozen)
    except NoAppendFormError as missing:
        return str(missing)
    return ""


def encode(packer: SidePacker, x: torch.Tensor, frozen: Frozen, starts: torch.Tensor) -> PackedBlock:
    """Encode tokens of shape (blocks, kv_heads, tokens, head_dim), in any float dtype, as the model made them.

    For sides that `refusal` has nothing against.
    """
    prepared = _prepared(packer, frozen, x.device)
    form, vectors = prepared.form, prepared.vectors
    x = x if x.stride(-1) == 1 else x.contiguous()
    blocks, heads, tokens, head_dim = x.shape
    parts = {
        part.name: x.new_empty(
            (blocks, heads, *((tokens, *part.shape[1:]) if part.name in TOKEN_PARTS else part.shape)),
            dtype=STORAGE[part.dtype],
        )
        for part in packer.layout.parts
    }
    page = next((step.offset(starts) for step in frozen.chain.steps if isinstance(step, PageMean)), None)
    pages = vectors if page is None else page.contiguous()
    factor = carry_steps(metric) if form.feedback and (metric := frozen.factor()) is not None else (vectors, vectors)
    strides = (*x.stride()[:3], vectors.stride(0), vectors.stride(1) if vectors.shape[1] > 1 else 0, head_dim)
    settings = constants(form, warp_size(x.device))
    sums = vectors
    if form.mean:
        sums = x.new_empty((blocks, heads, settings["APART"], head_dim), dtype=torch.float32)
        append_sums[(settings["APART"], heads, blocks)](
            x, vectors, prepared.matrix, pages, sums, heads, tokens, *strides, **_own(append_sums, settings), **COMPILER
        )  # fmt: skip
    scale = next(parts[name] for name in ("token", "channel", "block") if name in parts)
    zero = next((parts[name] for name in ("zero", "offset", "block") if name in parts), scale)
    programs = -(-tokens // settings["T"]) if form.over == "group" else 1
    append[(programs, heads, blocks)](
        x, vectors, prepared.matrix, pages, sums, *factor, prepared.edges, prepared.levels, prepared.multiples,
        parts["code"], scale, zero, heads, tokens, *strides, prepared.scale_by, **_own(append, settings), **COMPILER
    )  # fmt: skip
    return PackedBlock(packer.layout, parts)


def constants(form: AppendForm, warp_size: int) -> dict[str, Any]:
    """Return the compile-time arguments of both kernels."""
    padded = 1 << (form.d - 1).bit_length()
    group = form.width if form.width < form.d else padded
    values = _VALUES_WITH_FEEDBACK if form.feedback else _VALUES
    adjacent = min(max(1, padded // values), form.unit, group)
    tokens = warp_size * WARPS // adjacent
    given = {name.upper(): value for name, value in asdict(form).items() if name != "mean"}
    apart = max(1, (1 << (form.mean - 1).bit_length()) // tokens) if form.mean else 0
    shape = {"J": padded // group, "M": group // adjacent, "T": tokens, "L": adjacent}
    return {**given, **shape, "APART": apart, "COUNT": len(MULTIPLES), "NEARBY": len(NEARBY)}


def warp_size(device: torch.device) -> int:
    """Threads of a warp; the interpreter's are those of most GPUs."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _own(kernel: Any, settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in kernel.arg_names}


def _prepared(packer: SidePacker, frozen: Frozen, device: torch.device) -> Prepared:
    prepared = _KNOWN.get(frozen)
    if prepared is None or prepared.levels.device != device:
        prepared = _KNOWN[frozen] = _prepare(packer, frozen, device)
    return prepared


def _prepare(packer: SidePacker, frozen: Frozen, device: torch.device) -> Prepared:
    form, codec = append_form(packer, frozen), packer.codec
    vectors = [vector for fitted in frozen.chain.steps for vector in _vectors(fitted)]
    heads = max((len(vector) for vector in vectors), default=1)
    empty = torch.zeros(1, 1, form.d)
    table = codec.table()
    assert table is not None
    levels = table[:8] if form.codec == "e2m1" else table  # magnitudes; the sign is a bit
    multiples = (*MULTIPLES, *(1 / multiple for multiple in MULTIPLES), *NEARBY)
    matrix = empty
    if "matrix" in form.steps:
        rotation = frozen.chain.steps[0]
        assert isinstance(rotation, Rotation)
        matrix = rotation_matrix(rotation.settings, form.d, "cpu", torch.float32)
    return Prepared(
        form=form,
        vectors=torch.stack([v.to(device).float().expand(heads, -1) for v in vectors or [empty[0]]]),
        matrix=matrix.to(device),
        edges=midpoints(levels).to(device),
        levels=levels.to(device),
        multiples=torch.tensor(multiples, dtype=torch.float32, device=device),
        scale_by=codec.peak_factor if isinstance(codec, MicrofloatCodec) else 0.0,
    )


def _vectors(fitted: Fitted) -> list[torch.Tensor]:
    """One (kv_heads or 1, head_dim) for each kernel step of a transform; zeros for those that need none."""
    if isinstance(fitted, Balanced):
        return [fitted.weight]
    if isinstance(fitted, Mean):
        return [fitted.mean]
    if isinstance(fitted, PageMean):
        return [torch.zeros_like(fitted.mean[:1])]
    assert isinstance(fitted, Rotation)
    own = torch.zeros(1, fitted.head_dim)
    return [sign_vector(fitted.head_dim)[None], own] if fitted.settings.signs else [own]
