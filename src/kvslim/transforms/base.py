"""What a transform is: fitted once on what is known at the first seal, then a fixed invertible map per kv head.

A stored token is ``x' = (x - mu) A``. Attention never undoes it: queries take ``q' = q A^-T`` plus a bias ``q.mu``,
and the summed values take ``A^-1`` once per query. A chain applies its transforms in order and undoes them in reverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Sample:
    """What is known when the parameters of one side of one layer are frozen.

    Attributes
    ----------
    x : Tensor of shape (kv_heads, tokens, head_dim), fp32
        Keys or values of real tokens, as the model made them.
    moment : Tensor of shape (kv_heads, head_dim, head_dim), fp32, or None
        E[q q^T] over the queries of the same prompt, the heads of a group together; None on the value side.
    block : int
        Tokens per block.
    tokens : int
        Tokens of the prompt that `x` was drawn from (`x` may hold fewer).
    prior : mapping of str to Tensor
        Statistics of a calibration for this layer and side; empty without one.
    """

    x: torch.Tensor
    moment: torch.Tensor | None = None
    block: int = 128
    tokens: int = 0
    prior: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """Parameters of a fitted transform in a file.

    Attributes
    ----------
    names : frozenset of str
    take : callable
        ``take(name, shape, dtype)`` gives a finite tensor of that form (-1: any size), or raises StateFileError.
    kv_heads, head_dim, block : int
    where : str
        How errors call the place.
    """

    names: frozenset[str]
    take: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
    kv_heads: int
    head_dim: int
    block: int
    where: str

    def vector(self, name: str) -> torch.Tensor:
        """Return an fp32 parameter of shape (kv_heads, head_dim)."""
        return self.take(name, (self.kv_heads, self.head_dim), torch.float32)


class Fitted(ABC):
    """A transform with its parameters. All tensors are fp32 and have kv_heads (or 1) as first axis."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters that belong to the cache and are saved with it, by name."""
        return {}

    @abstractmethod
    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens ``(..., kv_heads, tokens, head_dim)``; `starts` is the position of each block's first token."""

    @abstractmethod
    def query(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map queries ``(kv_heads, rows, head_dim)``; also the score bias ``(kv_heads, rows, 1)`` or None."""

    @abstractmethod
    def output(self, acc: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """Undo the map on summed values ``(kv_heads, rows, head_dim)`` of probability mass ``(kv_heads, rows, 1)``."""

    def offset(self, starts: torch.Tensor) -> torch.Tensor | None:
        """Return the mean that `forward` removed from blocks at `starts`, ``(blocks, kv_heads, head_dim)``, or None."""
        return None

    def offset_scores(self, q: torch.Tensor, starts: torch.Tensor) -> torch.Tensor | None:
        """``q.offset(starts)`` of queries as `query` takes them, ``(kv_heads, rows, blocks)``, or None."""
        return None


class Transform(ABC):
    """Settings of a transform, a frozen dataclass. `fit` turns them into a `Fitted`."""

    needs_queries = False  # whether `fit` reads the query moment

    @property
    def prior(self) -> str:
        """How much a calibration matters to `fit`: ``unused``, ``helps`` or ``needed``."""
        return "unused"

    @abstractmethod
    def fit(self, sample: Sample) -> Fitted:
        """Freeze the parameters."""

    @abstractmethod
    def restore(self, saved: Saved) -> Fitted:
        """Take the parameters, `Fitted.tensors`, out of a file; raises StateFileError where they cannot be right."""


class Chain(Fitted):
    """Fitted transforms applied one after the other; the empty chain is the identity."""

    def __init__(self, steps: tuple[Fitted, ...] = ()):
        self.steps = steps

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{name}": tensor for i, step in enumerate(self.steps) for name, tensor in step.tensors().items()}

    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        for step in self.steps:
            x = step.forward(x, starts)
        return x

    def query(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        total = None
        for step in self.steps:
            q, bias = step.query(q)
            if bias is not None:
                total = bias if total is None else total + bias
        return q, total

    def output(self, acc: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        for step in reversed(self.steps):
            acc = step.output(acc, mass)
        return acc

    def offset(self, starts: torch.Tensor) -> torch.Tensor | None:
        total = None
        for step in self.steps:
            if total is not None:
                total = step.forward(total.unsqueeze(-2)).squeeze(-2)
            own = step.offset(starts)
            if own is not None:
                total = own if total is None else total + own
        return total

    def offset_scores(self, q: torch.Tensor, starts: torch.Tensor) -> torch.Tensor | None:
        total = None
        for step in self.steps:
            own = step.offset_scores(q, starts)
            if own is not None:
                total = own if total is None else total + own
            q, _ = step.query(q)
        return total


def fit_chain(transforms: tuple[Transform, ...], sample: Sample) -> Chain:
    """Fit each transform on what the ones before it leave."""
    steps: list[Fitted] = []
    for transform in transforms:
        if steps:  # what the last one leaves is nobody's sample: a copy of it would stand in the peak of a prefill
            moment = None if sample.moment is None else map_moment(steps[-1], sample.moment)
            sample = replace(sample, x=steps[-1].forward(sample.x), moment=moment)
        steps.append(transform.fit(sample))
    return Chain(tuple(steps))


def map_moment(step: Fitted, moment: torch.Tensor) -> torch.Tensor:
    """E[q' q'^T] of the queries that `step` maps: B^T M B for q' = q B, as two row maps."""
    half = step.query(moment)[0].transpose(-1, -2)
    return step.query(half)[0]
