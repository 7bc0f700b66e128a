"""How far an answer strays and whether it loops: pure functions of token ids."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 64
_REPEATS = 3


def first_divergence(base: Sequence[int], run: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one has ended; None if they are equal."""
    for index, (before, after) in enumerate(zip(base, run, strict=False)):
        if before != after:
            return index
    return None if len(base) == len(run) else min(len(base), len(run))


def distinct_ngrams(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that are different from all before them; 1 where there is no n-gram."""
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loop_tokens(ids: Sequence[int], longest_period: int = LONGEST_PERIOD) -> int:
    """Tokens at the end that are one stretch over and over, three times or more; 0 if there is no loop."""
    longest = 0
    for period in range(1, longest_period + 1):
        same = 0
        while same + period < len(ids) and ids[-1 - same] == ids[-1 - same - period]:
            same += 1
        if same + period >= _REPEATS * period:
            longest = max(longest, same + period)
    return longest
