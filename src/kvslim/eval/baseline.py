"""The baseline: the same tokens through transformers' own cache, remembered on disk without any loss.

Log-probabilities of 512 tokens over a vocabulary of 150,000 take 310 MB in float32, and at 16 bits they are rounded by
up to 0.004 each. So what is kept is the input of the output head, 1,000 times smaller: the head turns it into the same
logits again. Models that change their logits after the head (soft caps, scales) are found by comparing, and not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from kvslim.eval.forced import feed, feed_chunks
from kvslim.eval.measures import log_probs
from kvslim.eval.protocol import Protocol
from kvslim.eval.shelf import Shelf
from kvslim.integrations.transformers.fingerprint import fingerprint


class Baseline:
    """Log-probabilities of the 16-bit cache for passages of a text.

    Parameters
    ----------
    model
        The model that the recipes run on.
    protocol : Protocol
    shelf : Shelf or None
        Where to remember; None runs the model every time.
    """

    def __init__(self, model: Any, protocol: Protocol, shelf: Shelf | None):
        self.model, self.protocol = model, protocol
        self._head = model.get_output_embeddings()
        self.shelf = shelf if self._head is not None else None
        self._model_key = fingerprint(model) if self.shelf else ""

    def log_probs(self, ids: torch.Tensor, on_tokens: Callable[[int], object]) -> list[torch.Tensor]:
        """Log-probabilities of a passage.

        Parameters
        ----------
        ids : Tensor of shape (passage,)
        on_tokens : callable
            Called with the number of tokens done, now and then.

        Returns
        -------
        list of Tensor of shape (up to chunk, vocabulary), float32
        """
        protocol = self.protocol
        states = self.shelf.load(self._key(ids)) if self.shelf else None
        if states is None or len(states) != protocol.score:
            return self._run(ids, on_tokens)
        parts = [log_probs(self._logits(part.to(self.model.device))) for part in states.split(protocol.chunk)]
        on_tokens(protocol.prefill + protocol.score)
        return parts

    def _run(self, ids: torch.Tensor, on_tokens: Callable[[int], object]) -> list[torch.Tensor]:
        protocol, model = self.protocol, self.model
        cache = DynamicCache(config=model.config)
        stored, scored = ids[: protocol.prefill], ids[protocol.prefill : -1]
        feed(model, cache, stored, protocol.offset_positions, keep=1)
        on_tokens(len(stored))
        position = protocol.offset_positions + len(stored)
        parts, states = [], []
        with _Inputs(self._head) as inputs:
            for logits in feed_chunks(model, cache, scored, position, protocol.chunk, on_tokens):
                if self.shelf and inputs.last is not None and torch.equal(self._logits(inputs.last), logits):
                    states.append(inputs.last.cpu())
                parts.append(log_probs(logits))
        if self.shelf and len(states) == len(parts):
            self.shelf.save(self._key(ids), torch.cat(states))
        return parts

    @torch.no_grad()
    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """What the head alone makes of its input, (tokens, hidden) to (tokens, vocabulary)."""
        return self._head(states[None])[0]

    def _key(self, ids: torch.Tensor) -> str:
        protocol, config = self.protocol, self.model.config
        parts = (
            self._model_key,
            (protocol.prefill, protocol.score, protocol.chunk, protocol.offset_positions),
            ids.tolist(),
            (config._attn_implementation, self.model.device.type, torch.__version__, transformers.__version__),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class _Inputs:
    """Notes what a module is fed, while it is entered."""

    def __init__(self, module: torch.nn.Module | None):
        self.module = module
        self.last: torch.Tensor | None = None

    def __enter__(self) -> _Inputs:
        self._hook = self.module.register_forward_pre_hook(self._note) if self.module is not None else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _note(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.last = inputs[0][0]
