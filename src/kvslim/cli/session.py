"""A loaded model with a recipe: tokenizes, makes caches, and generates with the text streamed and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from kvslim.codecs import build_codec
from kvslim.errors import InputError, StateError
from kvslim.integrations.transformers import KVCache, compat
from kvslim.integrations.transformers.loading import LoadedModel, load_model
from kvslim.recipe import Recipe
from kvslim.transforms import build_transforms


@dataclass(frozen=True)
class Reply:
    """What one call of `Session.reply` made.

    Attributes
    ----------
    text : str
        Without special tokens.
    ids : list of int
        New tokens, the end token included.
    prompt_tokens, fed_tokens : int
        Tokens of the whole prompt, and those of them that were not in the cache yet.
    prefill_seconds, decode_seconds : float
        Until the first new token, and from there to the last.
    """

    text: str
    ids: list[int]
    prompt_tokens: int
    fed_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens fed per second."""
        return self.fed_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens per second after the first one; 0 if there was only one."""
        return (len(self.ids) - 1) / self.decode_seconds if len(self.ids) > 1 else 0.0


@dataclass(frozen=True)
class Session:
    """A loaded model and the recipe its caches are packed with."""

    loaded: LoadedModel
    recipe: Recipe

    @classmethod
    def open(
        cls,
        model: str,
        recipe: str,
        *,
        key: str | None,
        value: str | None,
        weights: str,
        dtype: str,
        device: str | None,
        models_dir: Path | None,
    ) -> Session:
        """Check the recipe first, since loading takes a while, then load the model."""
        chosen = Recipe.parse(recipe).with_sides(key=key, value=value)
        for side in (chosen.key, chosen.value):
            build_codec(side), build_transforms(side)
        loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
        return cls(loaded, chosen)

    def new_cache(self) -> KVCache:
        """Return an empty cache for the model."""
        return KVCache(self.loaded.model, self.recipe)

    @property
    def context(self) -> int | None:
        """Tokens the model was made for, or None if its config does not say."""
        return compat.context_limit(self.loaded.model.config)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer can format messages."""
        return self.loaded.tokenizer.chat_template is not None

    def encode(self, text: str, *, more: bool = False) -> list[int]:
        """Token ids of plain text; `more`: of text that goes on, without the tokens that begin one."""
        return self.loaded.tokenizer(text, add_special_tokens=not more)["input_ids"]

    def encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks."""
        tokens = self.loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return tokens["input_ids"]

    def check_room(self, prompt_tokens: int, new_tokens: int) -> None:
        """Refuse a prompt that is empty or does not fit into the context together with its answer."""
        if not prompt_tokens:
            raise InputError("the prompt has no tokens; give some text")
        if self.context is not None and prompt_tokens + new_tokens > self.context:
            raise InputError(
                f"{prompt_tokens:,} prompt tokens and {new_tokens:,} new tokens make {prompt_tokens + new_tokens:,}; "
                f"the context of {self.loaded.name} is {self.context:,} tokens; shorten the prompt or ask for fewer"
            )

    def reply(
        self,
        ids: list[int],
        cache: KVCache,
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int | None,
        on_text: Callable[[str], object],
    ) -> Reply:
        """Generate after the prompt `ids`, whose first tokens may be in `cache` already."""
        if seed is not None:
            torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else _GREEDY
        model, fed = self.loaded.model, len(ids) - cache.get_seq_length()
        prompt = torch.tensor([ids], device=model.device)
        streamer = _TimedStreamer(self.loaded.tokenizer, on_text)
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            pad_token_id=_pad_token(self.loaded),
            **{compat.CACHE_ARGUMENT: cache},
            **sampling,
        )
        new = output[0, len(ids) :].tolist()
        text = self.loaded.tokenizer.decode(new, skip_special_tokens=True)
        return Reply(text, new, len(ids), fed, *streamer.seconds())


def keep_prefix(cache: KVCache, held: list[int], ids: list[int]) -> None:
    """Crop a cache that holds tokens `held` to what it shares with `ids`, of which at least one must be fed."""
    most = min(cache.get_seq_length(), len(held), len(ids) - 1)
    shared = next((at for at in range(most) if held[at] != ids[at]), most)
    surplus = cache.get_seq_length() - shared
    try:
        if surplus:
            cache.crop(-surplus)
    except StateError:  # a sliding layer past its window cannot go back: feed everything again
        cache.reset()


_GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def _pad_token(loaded: LoadedModel) -> int | None:
    """Any token serves a batch of one; without it transformers warns."""
    tokenizer = loaded.tokenizer
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


class _TimedStreamer(TextStreamer):
    """Hands finished text to a callback and notes when tokens come."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self._times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self._times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)

    def seconds(self) -> tuple[float, float]:
        """Time to the first new token, and from there to the last."""
        start, first, last = self._times[0], self._times[1], self._times[-1]
        return first - start, last - first
