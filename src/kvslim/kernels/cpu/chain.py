"""Transform chains as the native kernels take them: a list of steps with pointers to the parameters."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kvslim.codecs.base import Codec
from kvslim.codecs.qjl import QJLCodec, query_sketch
from kvslim.kernels.cpu import abi
from kvslim.transforms.balance import Balanced
from kvslim.transforms.base import Chain, Fitted
from kvslim.transforms.center import Mean, PageMean
from kvslim.transforms.outlier import Permutation
from kvslim.transforms.rotate import Rotation, block_size, part_widths, rotation_matrix, sign_vector


class NoNativeFormError(Exception):
    """A transform or codec that the native kernels do not know; the text names it."""


@dataclass(frozen=True)
class Steps:
    """A chain in native form.

    Attributes
    ----------
    array : ctypes array of abi.Step
    kinds : tuple of int
    kept : tuple of Tensor
        What the pointers point to.
    """

    array: Any
    kinds: tuple[int, ...]
    kept: tuple[torch.Tensor, ...]

    @property
    def address(self) -> int:
        """Address of the first step."""
        return ctypes.addressof(self.array)


def native_steps(chain: Chain, head_dim: int, codec: Codec) -> Steps:
    """Translate a chain and what the codec does to queries.

    Raises
    ------
    NoNativeFormError
        A step is not known.
    """
    steps: list[abi.Step] = []
    kept: list[torch.Tensor] = []
    for fitted in chain.steps:
        for kind, tensor, fields in _native(fitted, head_dim):
            steps.append(_step(kind, tensor, kept, **fields))
    if steps[1:] and any(step.kind == abi.PAGE for step in steps[1:]):
        raise NoNativeFormError("center:kind=page after another transform")
    if isinstance(codec, QJLCodec):
        steps.append(_step(abi.EXPAND, query_sketch(head_dim, "cpu"), kept, width=head_dim))
    return Steps((abi.Step * max(1, len(steps)))(*steps), tuple(step.kind for step in steps), tuple(kept))


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
    if isinstance(fitted, Balanced):
        return [(abi.WEIGHT, fitted.weight, {})]
    if isinstance(fitted, Mean):
        return [(abi.MEAN, fitted.mean, {})]
    if isinstance(fitted, PageMean):
        rope = fitted.rope
        more = {"width": head_dim, "size": rope.pairs.shape[1], "pairs": rope.pairs, "frequency": rope.frequency}
        return [(abi.PAGE, fitted.mean, more)]
    if isinstance(fitted, Permutation):
        return [(abi.PERMUTE, fitted.order, {})]
    if isinstance(fitted, Rotation):
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
