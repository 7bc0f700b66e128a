"""Turns: CPU time of several functions, measured in turns in one process, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

_SHORTEST_S = 0.02  # of one turn; the clock of CPU time ticks in steps of up to 10 ms on some systems


def cpu_seconds(contestants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of one call, all threads of the process together.

    Parameters
    ----------
    contestants : mapping of str to callable
    rounds : int
        Turns of each.
    """
    calls = {name: _calls_per_turn(call) for name, call in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            taken[name].append(_turn(call, calls[name]) / calls[name])
    return {name: statistics.median(times) for name, times in taken.items()}


def _calls_per_turn(call: Callable[[], object]) -> int:
    call()  # the first call loads and allocates
    return max(1, round(_SHORTEST_S / max(_turn(call, 1), 1e-6)))


def _turn(call: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - start
