"""Entrant: one contestant with its cache, filled and decoded under measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import Any

import torch

from kvslim.bench.check import Check
from kvslim.bench.fill import RandomKV
from kvslim.bench.gauge import Gauge
from kvslim.eval.contestants import Contestant, using_attention
from kvslim.eval.forced import feed_batch


class Entrant:
    """One contestant at one context and batch.

    Parameters
    ----------
    contestant : Contestant
    model : PreTrainedModel
    """

    def __init__(self, contestant: Contestant, model: Any):
        self.contestant, self.model = contestant, model
        self.cache: Any = None
        self.gauge, self.first = Gauge(model.device), Gauge(model.device)
        self.check = Check.of(contestant.exact, model.dtype)
        self.error = ""

    def fill_with_text(self, ids: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """Feed ids of shape (batch, context), up to the first new token; returns its logits (batch, vocabulary)."""
        with using_attention(self.model, self.contestant.attention):
            self.cache = self.contestant.new_cache(self.model)  # may calibrate the model, which is not the cache's cost
            with self.gauge.first_turn(), self.first.lap():
                for start in range(0, ids.shape[1], chunk):
                    part = ids[:, start : start + chunk]
                    logits = feed_batch(self.model, self.cache, part, start, keep=1)[:, -1]
                logits.argmax(-1)
        return [logits]

    def fill_with(self, random_kv: RandomKV, context: int, batch: int) -> list[torch.Tensor]:
        """Write keys and values without running the model, so there are no logits to return."""
        with using_attention(self.model, self.contestant.attention):
            self.cache = self.contestant.new_cache(self.model)
            with self.gauge.first_turn():
                random_kv.fill(self.cache, context, batch)
        return []

    def decode(self, ids: torch.Tensor, position: int, *, timed: bool = True) -> list[torch.Tensor]:
        """Feed ids of shape (batch, steps) one by one; returns each step's logits (batch, vocabulary)."""
        found = []
        with using_attention(self.model, self.contestant.attention), self.gauge.turn():
            for step in range(ids.shape[1]):
                with self.gauge.lap(timed=timed):
                    part = ids[:, step : step + 1]
                    logits = feed_batch(self.model, self.cache, part, position + step, keep=1)[:, -1]
                    logits.argmax(-1)
                found.append(logits)
        return found

    def compete(self, run: Callable[[Entrant], Sequence[torch.Tensor]], expected: Sequence[torch.Tensor]) -> None:
        """Take a turn and compare its logits; a failure is noted, and ends this entrant's turns but nobody else's."""
        if self.error:
            return
        try:
            found = run(self)
        except Exception as error:  # a foreign cache may fail in any way
            self.error, self.cache = f"{type(error).__name__}: {shorten(str(error), 200)}", None
            return
        self.check.add_all(expected, found)
