"""Teacher forcing: feed known tokens through a cache and look at the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvslim.integrations.transformers import compat


def feed(model: Any, cache: Any, ids: torch.Tensor, position: int, *, keep: int) -> torch.Tensor:
    """Feed tokens and return the logits of the last `keep` of them.

    Parameters
    ----------
    model, cache
        Any transformers model and cache.
    ids : Tensor of shape (tokens,)
    position : int
        Position of the first of them, given to the model explicitly.

    Returns
    -------
    Tensor of shape (keep, vocabulary)
    """
    return feed_batch(model, cache, ids[None], position, keep=keep)[0]


@torch.no_grad()
def feed_batch(model: Any, cache: Any, ids: torch.Tensor, position: int, *, keep: int) -> torch.Tensor:
    """Feed the same number of tokens of several sequences: (batch, tokens) to logits (batch, keep, vocabulary)."""
    positions = torch.arange(position, position + ids.shape[1], device=model.device)
    output = model(
        input_ids=ids.to(model.device),
        position_ids=positions.expand(len(ids), -1),
        use_cache=True,
        logits_to_keep=keep,
        **{compat.CACHE_ARGUMENT: cache},
    )
    return output.logits


def feed_chunks(
    model: Any, cache: Any, ids: torch.Tensor, position: int, chunk: int, on_tokens: Callable[[int], object]
) -> Iterator[torch.Tensor]:
    """Feed `ids` in chunks; yields each chunk's logits of shape (up to chunk, vocabulary).

    Parameters
    ----------
    on_tokens : callable
        Called with the number of tokens fed, after every chunk.
    """
    for part in ids.split(chunk):
        yield feed(model, cache, part, position, keep=len(part))
        position += len(part)
        on_tokens(len(part))
