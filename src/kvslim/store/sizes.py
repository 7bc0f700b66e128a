"""Sizes: what a store holds after so many tokens, counted without a single one. Same rules as LayerStore and Pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvslim.errors import InputError
from kvslim.recipe import Recipe
from kvslim.store.layer import sealable
from kvslim.store.pool import grown


@dataclass(frozen=True)
class Feed:
    """How tokens come in.

    Attributes
    ----------
    context : int
        Tokens of each sequence in the end.
    batch : int
        Sequences, all of one length.
    chunk : int or None
        Tokens per pass of the prompt; None: all of it in one.
    new_tokens : int
        Those of `context` that come one by one after the prompt.
    """

    context: int
    batch: int = 1
    chunk: int | None = None
    new_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("batch", self.batch), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise InputError(f"{name}={value} is out of range; use 1 or more")
        if not 0 <= self.new_tokens < self.context:
            raise InputError(
                f"new_tokens={self.new_tokens} leaves no prompt in a context of {self.context}; use 0 to "
                f"{self.context - 1}"
            )

    @property
    def last_pass(self) -> int:
        """Tokens per sequence of the last pass."""
        if self.new_tokens:
            return 1
        return self.context if self.chunk is None else (self.context - 1) % self.chunk + 1

    def lengths(self) -> Iterator[int]:
        """Tokens of a sequence after each pass."""
        prompt = self.context - self.new_tokens
        if self.chunk is not None:
            yield from range(self.chunk, prompt, self.chunk)
        yield from range(prompt, self.context + 1)

    def stages(self) -> list[Feed]:
        """Where most may be held: the last whole chunk of the prompt, the prompt, and the end."""
        prompt = self.context - self.new_tokens
        found = [Feed(prompt, self.batch, self.chunk), self]
        if self.chunk is not None and prompt > self.chunk:
            found.insert(0, Feed(prompt - (prompt - 1) % self.chunk - 1, self.batch, self.chunk))
        return found


def packed_tokens(recipe: Recipe, tokens: int) -> int:
    """Those of a sequence's tokens that lie in blocks, however they came."""
    return sealable(max(0, tokens - recipe.sinks), recipe.recent, recipe.block, recipe.immediate)


def pool_blocks(recipe: Recipe, feed: Feed) -> int:
    """Blocks in each packed layer's pool, the unused ones of its slabs included."""
    capacity = taken = held = 0
    for length in feed.lengths():
        needed = -(-packed_tokens(recipe, length) // recipe.block)
        if needed == held:
            continue
        for _ in range(feed.batch):  # sequences seal one after the other, and each makes room for itself
            taken += needed - held
            capacity = grown(capacity, taken)
        held = needed
    return capacity
