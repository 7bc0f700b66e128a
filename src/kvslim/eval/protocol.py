"""The protocol: which passages of a text are fed, and how much of each is stored, then scored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from kvslim.errors import InputError
from kvslim.integrations.transformers import compat

OFFSETS = (2000, 90000, 180000)


@dataclass(frozen=True)
class Protocol:
    """How quality is measured.

    Attributes
    ----------
    prefill : int
        Tokens fed in one pass and stored.
    score : int
        Tokens after them that are fed through the cache and scored.
    chunk : int
        Tokens per pass while scoring; attention among them is exact.
    prefixes : int
        Passages of the text.
    offset_positions : int
        Added to every position, for the baseline as well: a good recipe does not notice.
    """

    prefill: int = 1024
    score: int = 512
    chunk: int = 32
    prefixes: int = 3
    offset_positions: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill", "score", "chunk", "prefixes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is out of range; use 1 or more")
        if self.offset_positions < 0:
            raise InputError(f"offset_positions={self.offset_positions} is out of range; use 0 or more")

    @property
    def passage(self) -> int:
        """Tokens of one passage: the last one is only a target."""
        return self.prefill + self.score + 1

    def offsets(self, tokens: int) -> list[int]:
        """Where the passages start in a text of so many tokens.

        Three passages start at `OFFSETS`, clipped to the text; any other number is spread evenly over the same range.
        In a text so short that they would overlap, passages are spread evenly from its first token to its last.

        Raises
        ------
        InputError
            The text is too short for passages that do not overlap.
        """
        needed = self.prefixes * self.passage
        if tokens < needed:
            raise InputError(
                f"the text has {tokens:,} tokens, but {self.prefixes} prefixes of {self.prefill} + {self.score} + 1 "
                f"need {needed:,}; give a longer text, or lower --prefixes, --prefill or --score"
            )
        last = tokens - self.passage
        clipped = [min(offset, last) for offset in self._wanted()]
        if all(b - a >= self.passage for a, b in pairwise(clipped)):
            return clipped
        return _spread(0, last, self.prefixes)

    def _wanted(self) -> list[int]:
        if self.prefixes == len(OFFSETS):
            return list(OFFSETS)
        return _spread(OFFSETS[0], OFFSETS[-1], self.prefixes)

    def passages(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Cut a text of shape (tokens,) into passages of shape (passage,)."""
        return [ids[start : start + self.passage] for start in self.offsets(len(ids))]

    def check_context(self, config: Any) -> None:
        """Refuse passages that reach past the context of the model.

        Raises
        ------
        InputError
            Naming both lengths.
        """
        limit = compat.context_limit(config)
        reach = self.offset_positions + self.prefill + self.score
        if limit is not None and reach > limit:
            raise InputError(
                f"passages reach position {reach:,}, the model's context is {limit:,} tokens; "
                "lower --prefill, --score or --offset-positions"
            )

    def to_dict(self) -> dict[str, int]:
        """Plain values."""
        return asdict(self)


def _spread(first: int, last: int, count: int) -> list[int]:
    return [first + (last - first) * index // max(count - 1, 1) for index in range(count)]
