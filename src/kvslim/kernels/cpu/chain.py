"""Transform chains as the native kernels take them: a list of steps with pointers to the parameters."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvslim.codecs.base import Codec
from kvslim.codecs.levels import integer_unit
from kvslim.codecs.qjl import QJLCodec, query_sketch
from kvslim.codecs.side import Frozen, SidePacker
from kvslim.kernels.cpu import abi
from kvslim.transforms.balance import Balanced
from kvslim.transforms.base import Fitted
from kvslim.transforms.center import Mean, PageMean
from kvslim.transforms.outlier import Permutation
from kvslim.transforms.rotate import Rotation, block_size, part_widths, rotation_matrix, sign_vector


class NoNativeFormError(Exception):
    """A transform or codec that the native kernels do not know; the text names it."""


@dataclass(frozen=True)
class Steps:
    """A frozen side in native form.

    Attributes
    ----------
    array : ctypes array of abi.Step
    kinds : tuple of int
    kept : tuple of Tensor
        What the pointers point to.
    unit : float
        What all levels of the code table are whole multiples of; 0 where there is none.
    """

    array: Any
    kinds: tuple[int, ...]
    kept: tuple[torch.Tensor, ...]
    unit: float

    @property
    def address(self) -> int:
        """Address of the first step."""
        return ctypes.addressof(self.array)


_KNOWN: WeakKeyDictionary[Frozen, Steps] = WeakKeyDictionary()


def native_steps(packer: SidePacker, frozen: Frozen) -> Steps:
    """Translate the chain of a frozen side and what its codec does to queries; once, it never changes.

    Raises
    ------
    NoNativeFormError
        A step is not known.
    """
    steps = _KNOWN.get(frozen)
    if steps is None:
        steps = _KNOWN[frozen] = _translated(packer, frozen)
    return steps


def _translated(packer: SidePacker, frozen: Frozen) -> Steps:
    head_dim = packer.layout.head_dim
    steps: list[abi.Step] = []
    kept: list[torch.Tensor] = []
    for fitted in frozen.chain.steps:
        for kind, tensor, fields in _native(fitted, head_dim):
            steps.append(_step(kind, tensor, kept, **fields))
    if steps[1:] and any(step.kind == abi.PAGE for step in steps[1:]):
        raise NoNativeFormError("center:kind=page after another transform")
    codec = type(packer.codec)
    if codec is not QJLCodec and (codec.expand_query, codec.reduce_output) != (Codec.expand_query, Codec.reduce_output):
        raise NoNativeFormError(f"codec {codec.__name__}, which maps queries or outputs")
    if codec is QJLCodec:
        steps.append(_step(abi.EXPAND, query_sketch(head_dim, "cpu"), kept, width=head_dim))
    unit = 0.0 if frozen.table is None else integer_unit(frozen.table)
    return Steps((abi.Step * max(1, len(steps)))(*steps), tuple(step.kind for step in steps), tuple(kept), unit)


def _step(kind: int, tensor: torch.Tensor | None, kept: list[torch.Tensor], **fields: Any) -> abi.Step:
    step = abi.Step(kind=kind)
    if tensor is not None:
        tensor = tensor.contiguous()
        kept.append(tensor)
        step.data = tensor.data_ptr()
        # parameters have one row per kv head, or one row or matrix for all
        per_head = kind not in (abi.MATRIX, abi.EXPAND) and tensor.ndim == 2 and len(tensor) > 1
        step.stride = tensor.stride(0) if per_head else 0
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            value = value.contiguous()
            kept.append(value)
            value = value.data_ptr()
        setattr(step, name, value)
    return step


def _native(fitted: Fitted, head_dim: int) -> list[tuple[int, torch.Tensor | None, dict[str, Any]]]:
    """Kind, parameters and further fields of each step that `fitted` becomes."""
    if type(fitted) is Balanced:
        return [(abi.WEIGHT, fitted.weight, {})]
    if type(fitted) is Mean:
        return [(abi.MEAN, fitted.mean, {})]
    if type(fitted) is PageMean:
        rope = fitted.rope
        more = {"width": head_dim, "size": rope.pairs.shape[1], "pairs": rope.pairs, "frequency": rope.frequency}
        return [(abi.PAGE, fitted.mean, more)]
    if type(fitted) is Permutation:
        return [(abi.PERMUTE, fitted.order, {})]
    if type(fitted) is Rotation:
        return _rotation(fitted)
    raise NoNativeFormError(f"transform {type(fitted).__name__}")


def _rotation(fitted: Rotation) -> list[tuple[int, torch.Tensor | None, dict[str, Any]]]:
    settings, head_dim = fitted.settings, fitted.head_dim
    if settings.kind == "orthogonal":
        return [(abi.MATRIX, rotation_matrix(settings, head_dim, "cpu", torch.float32), {"width": head_dim})]
    steps: list[tuple[int, torch.Tensor | None, dict[str, Any]]] = []
    if settings.signs:
        steps.append((abi.WEIGHT, _signs(head_dim), {}))
    first = 0
    for width in part_widths(head_dim, settings.parts):
        steps.append((abi.HADAMARD, None, {"first": first, "width": width, "size": block_size(width)}))
        first += width
    return steps


@lru_cache(maxsize=16)
def _signs(head_dim: int) -> torch.Tensor:
    return sign_vector(head_dim).float()
