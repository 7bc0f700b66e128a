"""Prompts in a left-padded batch: fed into several caches, answered greedily, or followed by known tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvslim.eval.shared_prefill import SharedPrefill, can_share
from kvslim.integrations.transformers import KVCache, compat


@dataclass(frozen=True)
class Batch:
    """Tokenized prompts, padded on the left.

    Attributes
    ----------
    ids, mask : Tensor of shape (prompts, longest), int64
        The mask is 1 at real tokens.
    lengths : Tensor of shape (prompts,), int64
    """

    ids: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[torch.Tensor], device: torch.device) -> Batch:
        """Pad prompts of shape (tokens,) to the longest one; any token pads, since the mask hides it."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        return cls(ids.to(device), mask.to(device), mask.sum(1).to(device))

    def without_last(self, count: int) -> Batch:
        """The same prompts without their last `count` tokens."""
        width = self.ids.shape[1] - count
        return Batch(self.ids[:, :width], self.mask[:, :width], self.lengths - count)


def prefill(model: Any, caches: Sequence[KVCache], batch: Batch) -> torch.Tensor:
    """Fill empty caches with the prompts; returns the logits after them, shape (prompts, vocabulary)."""
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    passes: Sequence[Any] = [SharedPrefill(caches)] if can_share(caches) else caches
    logits = [_forward(model, cache, batch.ids, batch.mask, positions, keep=1) for cache in passes]
    return logits[0][:, -1]


def ask(model: Any, cache: KVCache, batch: Batch, count: int) -> torch.Tensor:
    """Feed the last `count` tokens of the prompts to a cache that holds the others; logits as `prefill` has them."""
    return _follow(model, cache, batch.without_last(count), batch.ids[:, -count:], 0)[:, -1]


def answer(
    model: Any,
    cache: KVCache,
    batch: Batch,
    logits: torch.Tensor,
    *,
    new_tokens: int,
    on_tokens: Callable[[int], object],
) -> list[list[int]]:
    """Continue greedily, without penalties; one list of token ids per prompt, without the end token.

    Parameters
    ----------
    model, cache
        The cache holds the prompts of `batch`.
    batch : Batch
    logits : Tensor of shape (prompts, vocabulary)
        As `prefill` or `ask` returns them.
    new_tokens : int
        Tokens per answer at most.
    on_tokens : callable
        Called with the number of tokens done; with ``new_tokens * prompts`` altogether.
    """
    stops = stop_tokens(model)
    rows: list[list[int]] = [[] for _ in batch.ids]
    ended = [False] * len(rows)
    for step in range(new_tokens):
        tokens = logits.argmax(-1)
        for index, token in enumerate(tokens.tolist()):
            ended[index] = ended[index] or token in stops
            if not ended[index]:
                rows[index].append(token)
        on_tokens(len(rows))
        if all(ended) or step == new_tokens - 1:
            on_tokens(len(rows) * (new_tokens - 1 - step))
            break
        logits = _follow(model, cache, batch, tokens[:, None], step)[:, -1]
    return rows


def force(model: Any, cache: KVCache, batch: Batch, ids: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """Feed known tokens after the prompts; yields each chunk's logits, shape (prompts, up to chunk, vocabulary).

    Parameters
    ----------
    ids : Tensor of shape (prompts, tokens)
    """
    done = 0
    for part in ids.split(chunk, dim=1):
        yield _follow(model, cache, batch, part, done)
        done += part.shape[1]


def stop_tokens(model: Any) -> set[int]:
    """Tokens that end an answer, as the model's generation config says."""
    stops = model.generation_config.eos_token_id
    return set() if stops is None else set(stops if isinstance(stops, list) else [stops])


def _follow(model: Any, cache: KVCache, batch: Batch, ids: torch.Tensor, done: int) -> torch.Tensor:
    """Feed `ids` after the prompts and `done` tokens more; every column after the prompts is real."""
    mask = torch.cat([batch.mask, batch.mask.new_ones(len(ids), done + ids.shape[1])], dim=1)
    positions = batch.lengths[:, None] + done + torch.arange(ids.shape[1], device=ids.device)
    return _forward(model, cache, ids, mask, positions, keep=ids.shape[1])


@torch.no_grad()
def _forward(
    model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *, keep: int
) -> torch.Tensor:
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=keep,
        **{compat.CACHE_ARGUMENT: cache},
    )
    return output.logits
