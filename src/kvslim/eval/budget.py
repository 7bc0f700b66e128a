"""Budget: what is asked about memory, and the answers: recipes side by side, weights taken out, contexts capped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvslim.errors import InputError
from kvslim.eval.plan import Plan, Size
from kvslim.integrations.transformers.shapes import WEIGHTS, ModelShape
from kvslim.recipe import Recipe
from kvslim.store.sizes import Feed


@dataclass(frozen=True)
class Planned:
    """What was asked about one recipe.

    Attributes
    ----------
    recipe : str
    size : Size
        Once the asked context is in.
    decoding_nbytes : int
        The same, where the last token came alone: sliding layers have then let go of the prompt.
    most_nbytes : int
        At the fullest moment on the way there.
    longest : int or None
        Tokens per sequence that fit in memory; None if no memory was named.
    curve : tuple of (int, int)
        Context and most bytes, at powers of two and at the asked context.
    """

    recipe: str
    size: Size
    decoding_nbytes: int
    most_nbytes: int
    longest: int | None
    curve: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plan: Plan, feed: Feed, room_nbytes: int | None) -> Planned:
        """Ask `plan` about a context and, if there is one, about a memory."""
        longest = None if room_nbytes is None else plan.longest(room_nbytes, feed)
        contexts = {1 << power for power in range(8, feed.context.bit_length())} | {feed.context}
        curve = tuple(
            (context, plan.most(replace(feed, context=context)))
            for context in sorted(contexts)
            if context > feed.new_tokens
        )
        alone = replace(feed, new_tokens=max(feed.new_tokens, min(1, feed.context - 1)))
        return cls(plan.name, plan.size(feed), plan.size(alone).nbytes, plan.most(feed), longest, curve)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, keys with their units."""
        curve = [{"context": context, "nbytes": nbytes} for context, nbytes in self.curve]
        return {
            "recipe": self.recipe,
            **self.size.to_dict(),
            "decoding_nbytes": self.decoding_nbytes,
            "most_nbytes": self.most_nbytes,
            "longest_context": self.longest,
            "curve": curve,
        }


@dataclass(frozen=True)
class Memory:
    """Room for weights and cache.

    Attributes
    ----------
    nbytes, weights_nbytes : int
    """

    nbytes: int
    weights_nbytes: int

    @classmethod
    def of(cls, nbytes: int, shape: ModelShape, weights: str) -> Memory:
        """Take the weights out of a memory; without a model there are none.

        Raises
        ------
        InputError
            They do not fit.
        """
        held = 0 if shape.parameters is None else shape.parameters.nbytes(weights)
        if held >= nbytes:
            smaller = "" if weights == WEIGHTS[-1] else f", or pack them with --weights {WEIGHTS[-1]}"
            raise InputError(
                f"the {weights} weights of {shape.name} take {held:,} bytes, and the memory has {nbytes:,}: no room "
                f"for a cache; name more memory{smaller}"
            )
        return cls(nbytes, held)

    @property
    def room_nbytes(self) -> int:
        """What is left for the cache."""
        return self.nbytes - self.weights_nbytes


def default_feed(shape: ModelShape, feed: Feed, memory: Memory | None) -> Feed:
    """Return `feed` up to the model's own context, or else up to what 16 bits fit in memory.

    Raises
    ------
    InputError
        There is neither a model nor a memory, or not even the shortest context fits.
    """
    context = shape.context
    if context is None:
        if memory is None:
            raise InputError("how long a context? without a model, give --context or --memory")
        context = Plan(shape, None).longest(memory.room_nbytes, feed)
        if not context:
            raise InputError(
                f"{memory.room_nbytes:,} bytes hold not even {feed.context} tokens of {shape.name} at 16 bits; name "
                "more memory, or give --context to see what it takes"
            )
    return replace(feed, context=context)


def ask(shape: ModelShape, recipes: Iterable[Recipe], feed: Feed, memory: Memory | None) -> list[Planned]:
    """Plan for the 16-bit cache and for each recipe.

    Raises
    ------
    InputError
        The context is past the model's, or a recipe does not fit the model.
    """
    if shape.context is not None and feed.context > shape.context:
        raise InputError(
            f"a context of {feed.context:,} tokens is past the {shape.context:,} that {shape.name} was made for; ask "
            "for fewer"
        )
    room = None if memory is None else memory.room_nbytes
    return [Planned.of(Plan(shape, recipe), feed, room) for recipe in (None, *recipes)]


def result(shape: ModelShape, feed: Feed, weights: str, memory: Memory | None, rows: list[Planned]) -> dict[str, Any]:
    """All of an answer as plain values."""
    parameters = shape.parameters
    return {
        "kind": "plan",
        "model": shape.name,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "context_limit": shape.context,
        "layers": [asdict(layer) for layer in shape.layers],
        **asdict(feed),
        "weights": None
        if parameters is None
        else {"kind": weights, **asdict(parameters), "nbytes": parameters.nbytes(weights)},
        "memory_nbytes": None if memory is None else memory.nbytes,
        "rows": [row.to_dict() for row in rows],
    }
