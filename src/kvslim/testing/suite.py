"""A suite: checks that each yield what is wrong, and one error that lists it all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kvslim.errors import ConformanceError, KVSlimError

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512)
# What a check does to its subject, and a line for each thing that is wrong. Its docstring says what must hold.
Check = Callable[[Any], Iterator[str]]


def run(name: str, subject: Any, checks: Iterable[Check]) -> None:
    """Run all checks on `subject`; a check that raises has failed, and the others still run.

    Raises
    ------
    ConformanceError
        Listing every failed check.
    """
    failed = []
    for check in checks:
        title = (check.__doc__ or check.__name__).splitlines()[0].rstrip(".")
        wrong: list[str] = []
        try:
            wrong.extend(check(subject))
        except Exception as error:  # anyone's code may raise anything
            wrong.append(f"raised {type(error).__name__}: {error}")
        failed += [f"- {title}: {line}" for line in wrong]
    if failed:
        raise ConformanceError(f"{name} fails {len(failed)} times:\n" + "\n".join(failed))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """N(0,1), the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def refusal(error: Exception, head_dim: int) -> Iterator[str]:
    """What is wrong with how `head_dim` was refused."""
    text = str(error)
    if not isinstance(error, (ValueError, KVSlimError)):
        yield f"head_dim={head_dim} raises {type(error).__name__}: {text}; a refusal is a RecipeError or ValueError"
    elif str(head_dim) not in text or not any(word in text for word in ("use ", "allowed", "must", "at least")):
        yield f"head_dim={head_dim} is refused with '{text}', which names not both it and what to use"


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parts that differ in a byte."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [name for name in one if not same_bytes(one[name], other[name])]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike to the bit; NaN equals itself, 0.0 is not -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
