"""Plan: what a benchmark of decoding runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvslim.errors import InputError, did_you_mean
from kvslim.integrations.transformers import compat

FILLS = ("text", "random-kv")


@dataclass(frozen=True)
class Plan:
    """How decoding is measured.

    Attributes
    ----------
    contexts, batches : tuple of int
        Every context with every batch: tokens of each sequence in the cache before the first step, and sequences.
    steps, rounds : int
        Contestants take turns of `steps` steps, `rounds` times.
    chunk : int
        Tokens per pass while the cache is filled with text.
    fill : str
        "text" feeds the model a text; "random-kv" writes Gaussian keys and values, with the mean and spread of the
        model's own per layer, head and channel, straight into the cache: long contexts without the prefill.
    """

    contexts: tuple[int, ...] = (256, 1024)
    batches: tuple[int, ...] = (1,)
    steps: int = 8
    rounds: int = 5
    chunk: int = 512
    fill: str = "text"

    def __post_init__(self) -> None:
        for name in ("contexts", "batches"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty; give one number or more, for example 256,1024")
            if min(getattr(self, name)) < 1:
                raise InputError(f"{name}={','.join(map(str, getattr(self, name)))} is out of range; use 1 or more")
        for name in ("steps", "rounds", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is out of range; use 1 or more")
        if self.fill not in FILLS:
            raise InputError(f"unknown fill '{self.fill}'; use {' or '.join(FILLS)}.{did_you_mean(self.fill, FILLS)}")

    @property
    def decoded(self) -> int:
        """Tokens that every sequence is fed one by one: a step to warm up, then the timed ones."""
        return 1 + self.steps * self.rounds

    def check_context(self, config: Any) -> None:
        """Refuse contexts that do not fit into the model's.

        Raises
        ------
        InputError
            Naming both lengths.
        """
        limit = compat.context_limit(config)
        reach = max(self.contexts) + self.decoded
        if limit is not None and reach > limit:
            raise InputError(
                f"a context of {max(self.contexts):,} tokens and {self.decoded:,} decoded ones make {reach:,}; the "
                f"model's context is {limit:,} tokens; lower --contexts, --steps or --rounds"
            )

    def sequences(self, ids: torch.Tensor, context: int, batch: int) -> torch.Tensor:
        """Cut `batch` sequences out of a text of shape (tokens,), spread evenly; they may overlap.

        Returns
        -------
        Tensor of shape (batch, context + decoded); without the context where it is not text.

        Raises
        ------
        InputError
            The text is shorter than one sequence.
        """
        length = self.decoded + (context if self.fill == "text" else 0)
        last = len(ids) - length
        if last < 0:
            raise InputError(
                f"the text has {len(ids):,} tokens, a context of {context:,} needs {length:,}; "
                "give a longer --text, or use --fill random-kv"
            )
        starts = [last * index // max(batch - 1, 1) for index in range(batch)]
        return torch.stack([ids[start : start + length] for start in starts])

    def total_tokens(self, contestants: int) -> int:
        """Tokens that `measure_decode` reports to `on_tokens` altogether."""
        each = sum(batch * (context + self.decoded) for context in self.contexts for batch in self.batches)
        return contestants * each

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
