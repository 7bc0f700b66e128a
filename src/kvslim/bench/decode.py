"""Decoding end to end: contestants hold the same tokens and take turns in one process, a few steps each.

All are fed the same next tokens, those of the text, so that their outputs can be compared step by step; every step
still ends with the choice of a token, as in `generate`. What other work on the machine costs hits all of them alike.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from kvslim.bench.check import KL_LIMIT
from kvslim.bench.entrant import Entrant
from kvslim.bench.fill import RandomKV
from kvslim.bench.machine import machine_of
from kvslim.bench.plan import Plan
from kvslim.eval.contestants import Contestant, Held
from kvslim.eval.forced import feed_batch
from kvslim.eval.peers import Peer
from kvslim.eval.text import Text
from kvslim.eval.versions import versions
from kvslim.integrations.transformers.report import storage_nbytes

LARGEST_BATCH = "(memory - weights) / measured bytes of cache per sequence, linearly; activations left out"


@dataclass(frozen=True)
class DecodeRow:
    """One cache at one context and batch. Where `withheld` says why, there are no speeds.

    Attributes
    ----------
    cache : str
    context, batch : int
        Tokens of each sequence before the first step, and sequences.
    fill : str
        How the cache was filled; see `Plan`.
    decode_tokens_per_s : float
        New tokens of all sequences per second, at the median step.
    decode_ms, decode_ms_p25, decode_ms_p75, decode_ms_mean : float
        Wall time of a step; the mean also holds the rare ones that seal a block.
    decode_cpu_ms_per_token : float
        CPU time of all threads per new token, at the median step.
    first_token_ms : float
        From an empty cache to the first token; None as well where the model did not fill the cache.
    speedup_vs_16bit : float
        Median step of the 16-bit cache divided by this one's.
    nbytes, nbytes_16bit : int
        Every storage reachable from the cache at the end, and its tokens at 16 bits per value.
    bits_per_value : float
    process_nbytes, peak_nbytes : int
        Memory that filling the cache added to the process (CUDA: to the allocator), and the most that any of its turns
        added at once, activations included; None where the system does not say.
    kl : float
        KL(16 bits || this cache), mean over the steps; None if it is not finite.
    kernel, kernel_reason : str
        What reads the cache, and why nothing faster does.
    largest_batch : int
        Sequences that fit into the memory asked about.
    withheld : str
        Why no speed is named; None if it is.
    """

    cache: str
    context: int
    batch: int
    fill: str
    decode_tokens_per_s: float | None = None
    decode_ms: float | None = None
    decode_ms_p25: float | None = None
    decode_ms_p75: float | None = None
    decode_ms_mean: float | None = None
    decode_cpu_ms_per_token: float | None = None
    first_token_ms: float | None = None
    speedup_vs_16bit: float | None = None
    nbytes: int | None = None
    nbytes_16bit: int | None = None
    bits_per_value: float | None = None
    process_nbytes: int | None = None
    peak_nbytes: int | None = None
    kl: float | None = None
    kernel: str | None = None
    kernel_reason: str | None = None
    largest_batch: int | None = None
    withheld: str | None = None

    @classmethod
    def of(cls, entrant: Entrant, base: Entrant, where: dict[str, Any], room_nbytes: int | None) -> DecodeRow:
        """Sum up; `where` has the first fields, `room_nbytes` is the memory that caches may take."""
        name = entrant.contestant.name
        if entrant.error:
            return cls(name, **where, withheld=entrant.error)
        held, kl, failure = Held.of(entrant.cache), entrant.check.kl_mean, entrant.check.failure()
        return cls(
            name,
            **where,
            **({} if failure else _speeds(entrant, base, where["batch"])),
            nbytes=held.nbytes,
            nbytes_16bit=held.nbytes_16bit,
            bits_per_value=held.bits_per_value,
            process_nbytes=entrant.gauge.filled_nbytes,
            peak_nbytes=entrant.gauge.peak_nbytes,
            kl=kl if math.isfinite(kl) else None,
            kernel=held.kernel,
            kernel_reason=held.kernel_reason,
            largest_batch=None if room_nbytes is None else max(0, room_nbytes * where["batch"] // held.nbytes),
            withheld=failure,
        )

    @property
    def spread(self) -> float | None:
        """Half the distance of the quartiles, as a share of the median step."""
        if self.decode_ms is None or self.decode_ms_p25 is None or self.decode_ms_p75 is None:
            return None
        return (self.decode_ms_p75 - self.decode_ms_p25) / 2 / self.decode_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain values, keys with their units."""
        return {"kind": "bench-decode", **asdict(self)}


def _speeds(entrant: Entrant, base: Entrant, batch: int) -> dict[str, Any]:
    gauge, first = entrant.gauge, entrant.first.wall_s
    low, high = gauge.quartiles_s()
    return {
        "decode_tokens_per_s": batch / gauge.median_s,
        "decode_ms": 1000 * gauge.median_s,
        "decode_ms_p25": 1000 * low,
        "decode_ms_p75": 1000 * high,
        "decode_ms_mean": 1000 * statistics.mean(gauge.wall_s),
        "decode_cpu_ms_per_token": 1000 * statistics.median(gauge.cpu_s) / batch,
        "first_token_ms": 1000 * first[0] if first else None,
        "speedup_vs_16bit": base.gauge.median_s / gauge.median_s,
    }


def measure_decode(
    model: Any,
    ids: torch.Tensor,
    contestants: Sequence[Contestant],
    plan: Plan | None = None,
    *,
    memory_nbytes: int | None = None,
    on_tokens: Callable[[int], object] = lambda _: None,
) -> list[DecodeRow]:
    """Measure decoding with transformers' 16-bit cache, then with `contestants`.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor of shape (tokens,)
        A text to fill caches with, and to decode.
    contestants : sequence of Contestant
        Beside the 16-bit cache, which always runs. One that fails gets a row that says so.
    plan : Plan, optional
    memory_nbytes : int, optional
        Work out the largest batch for so much memory: weights and cache, linear in the batch.
    on_tokens : callable
        Called with the number of tokens done, now and then; see `Plan.total_tokens`.

    Returns
    -------
    list of DecodeRow
        By context, batch and contestant.

    Raises
    ------
    InputError
        The text or the model's context is too short.
    """
    plan = plan or Plan()
    plan.check_context(model.config)
    cells = [(context, batch) for context in plan.contexts for batch in plan.batches]
    inputs = [plan.sequences(ids, context, batch) for context, batch in cells]
    room = None if memory_nbytes is None else memory_nbytes - weights_nbytes(model)
    random_kv = RandomKV.of(model, ids) if plan.fill == "random-kv" else None
    feed_batch(model, DynamicCache(config=model.config), ids[None, :64], 0, keep=1)  # warms up torch, reads the weights
    rows = []
    for (context, batch), sequences in zip(cells, inputs, strict=True):
        entrants = [Entrant(contestant, model) for contestant in (Contestant.baseline(), *contestants)]
        _contest(entrants, sequences, context, plan, random_kv, on_tokens)
        where = {"context": context, "batch": batch, "fill": plan.fill}
        rows += [DecodeRow.of(entrant, entrants[0], where, room) for entrant in entrants]
    return rows


def _contest(
    entrants: list[Entrant],
    sequences: torch.Tensor,
    context: int,
    plan: Plan,
    random_kv: RandomKV | None,
    on_tokens: Callable[[int], object],
) -> None:
    """Fill every cache once, warm up, then take turns."""
    gc.collect()  # caches of the last contest may refer to themselves
    batch = len(sequences)
    decoded = sequences[:, -plan.decoded :]

    def fill(entrant: Entrant) -> list[torch.Tensor]:
        if random_kv is not None:
            return entrant.fill_with(random_kv, context, batch)
        return entrant.fill_with_text(sequences[:, :context], plan.chunk)

    def decode(start: int, stop: int) -> Callable[[Entrant], list[torch.Tensor]]:
        return lambda entrant: entrant.decode(decoded[:, start:stop], context + start, timed=start > 0)

    starts = range(1, plan.decoded, plan.steps)
    turns = [(fill, context), (decode(0, 1), 1), *((decode(at, at + plan.steps), plan.steps) for at in starts)]
    for number, (turn, tokens) in enumerate(turns):
        _turn(entrants, turn, number, partial(on_tokens, tokens * batch))


def _turn(
    entrants: list[Entrant],
    turn: Callable[[Entrant], list[torch.Tensor]],
    number: int,
    done: Callable[[], object],
) -> None:
    """Let the 16-bit cache go first and the others compare; whoever follows it changes from turn to turn."""
    base, *others = entrants
    expected = turn(base)  # without it nothing can be said: a failure here is the caller's
    base.check.add_all(expected, expected)
    done()
    shift = number % max(1, len(others))
    for entrant in (*others[shift:], *others[:shift]):
        entrant.compete(turn, expected)
        done()


def weights_nbytes(model: Any) -> int:
    """Bytes of a model's parameters and buffers; shared ones count once."""
    return storage_nbytes([*model.parameters(), *model.buffers()])


def result(
    loaded_name: str,
    model: Any,
    text: Text,
    plan: Plan,
    rows: list[DecodeRow],
    *,
    peers: Sequence[Peer] = (),
    memory_nbytes: int | None = None,
    command: str,
) -> dict[str, Any]:
    """All of a benchmark as plain values, with what is needed to repeat it."""
    memory = {"nbytes": memory_nbytes, "rule": LARGEST_BATCH}
    return {
        "model": loaded_name,
        "text": {"name": text.name, "sha256": text.sha256},
        "plan": plan.to_dict(),
        "weights_nbytes": weights_nbytes(model),
        "memory": memory if memory_nbytes is not None else None,
        "kl_limit": KL_LIMIT,
        "machine": machine_of(model),
        "versions": versions(peers),
        "command": command,
        "rows": [row.to_dict() for row in rows],
    }
