"""The demo: one long prompt, answered with the 16-bit cache and with several recipes, side by side."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvslim.errors import InputError
from kvslim.eval import measures
from kvslim.eval.contestants import BASELINE, using_attention
from kvslim.eval.forced import feed, feed_chunks
from kvslim.eval.prompt import build_prompt
from kvslim.integrations.transformers import KVCache, compat
from kvslim.integrations.transformers.report import LayerReport
from kvslim.recipe import Recipe

PAGES = 2048  # tokens of text in the prompt
SCORED = 128  # tokens on which recipes are compared with 16 bits: the answer, then more of the text
_CHUNK = 32
OnTokens = Callable[[int], object]


@dataclass(frozen=True)
class Holding:
    """What a cache holds after the answer.

    Attributes
    ----------
    bits_per_value : float
        Over everything held.
    nbytes, nbytes_16bit, peak_nbytes : int
        Held, what 16 bits would take, and the most at once.
    """

    bits_per_value: float
    nbytes: int
    nbytes_16bit: int
    peak_nbytes: int

    @classmethod
    def of(cls, cache: Any) -> Holding:
        """Read a packed cache's report; transformers' own cache is counted at 2 bytes per value, whatever its dtype."""
        if isinstance(cache, KVCache):
            report = cache.report()
            return cls(report.bits_per_value, report.nbytes, report.nbytes_16bit, report.peak_nbytes)
        sizes = [2 * LayerReport.of_dense(index, layer, "").values for index, layer in enumerate(cache.layers)]
        # appending is a concatenation: the longest layer is there twice
        return cls(16.0, sum(sizes), sum(sizes), sum(sizes) + max(sizes))


@dataclass(frozen=True)
class Answer:
    """One recipe's answer.

    Attributes
    ----------
    recipe : str
    holding : Holding
    prefill_tokens_per_s, decode_tokens_per_s : float
    kl_mean, top1 : float
        Against 16 bits, on the 16-bit answer and the text that follows the prompt's.
    text : str
    new_tokens : int
    """

    recipe: str
    holding: Holding
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    kl_mean: float
    top1: float
    text: str
    new_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values in one level, keys with their units."""
        values = asdict(self)
        return {**values.pop("holding"), **values}


@dataclass(frozen=True)
class _Fed:
    """A prompt in a cache, and the answer that came of it."""

    before: Any  # a copy of the cache as it was before the answer
    holding: Holding
    ids: list[int]
    prefill_seconds: float
    decode_seconds: float


class Demo:
    """One prompt on one model.

    Parameters
    ----------
    model, tokenizer
        The model on kvslim's attention.
    max_new_tokens : int
        Length of the answers at most.

    Raises
    ------
    InputError
        The prompt does not fit into the model's context.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_new_tokens: int = 48):
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self.scored = max(SCORED, max_new_tokens)
        self.prompt = build_prompt(tokenizer, tokens=PAGES, sequel=self.scored)
        limit = compat.context_limit(model.config)
        reach = len(self.prompt.ids) + self.scored
        if limit is not None and reach > limit:
            raise InputError(
                f"the demo needs a context of {reach:,} tokens, this model's is {limit:,}; use another --model"
            )

    @property
    def tokens_per_answer(self) -> int:
        """Tokens that `run` reports per answer."""
        return len(self.prompt.ids) + self.max_new_tokens + self.scored

    def run(self, recipes: Sequence[Recipe], on_tokens: OnTokens = lambda _: None) -> list[Answer]:
        """Answer with the 16-bit cache on sdpa, then with each recipe.

        Parameters
        ----------
        recipes : sequence of Recipe
        on_tokens : callable
            Called with the number of tokens done, now and then.
        """
        model = self.model
        feed(model, DynamicCache(config=model.config), self.prompt.ids[:64], 0, keep=1)  # the first call warms up torch
        with using_attention(model, "sdpa"):
            fed = self._answer(DynamicCache(config=model.config), on_tokens)
            forced = self._forced_ids(fed.ids)
            base = [measures.log_probs(logits) for logits in self._force(fed.before, forced, on_tokens)]
        answers = [self._compare(BASELINE, fed, base, base)]
        for recipe in recipes:
            fed = self._answer(KVCache(model, recipe), on_tokens)
            logits = self._force(fed.before, forced, on_tokens)
            answers.append(self._compare(recipe.label or str(recipe), fed, base, map(measures.log_probs, logits)))
        return answers

    def _answer(self, cache: Any, on_tokens: OnTokens) -> _Fed:
        """Feed the prompt, then decode greedily."""
        prompt, model = self.prompt.ids, self.model
        start = time.perf_counter()
        logits = feed(model, cache, prompt, 0, keep=1)
        prefilled = time.perf_counter()
        on_tokens(len(prompt))
        before = copy.deepcopy(cache)
        resumed = time.perf_counter()
        ids = [int(logits.argmax())]
        while len(ids) < self.max_new_tokens and ids[-1] not in self._stops():
            position = len(prompt) + len(ids) - 1
            ids.append(int(feed(model, cache, torch.tensor(ids[-1:]), position, keep=1).argmax()))
            on_tokens(1)
        seconds = time.perf_counter() - resumed
        on_tokens(self.max_new_tokens - len(ids) + 1)
        return _Fed(before, Holding.of(cache), ids, prefilled - start, seconds)

    def _stops(self) -> set[int]:
        stops = self.model.generation_config.eos_token_id
        return set(stops if isinstance(stops, list) else [stops])

    def _forced_ids(self, answer: list[int]) -> torch.Tensor:
        """The answer without its end token, then the pages after those of the prompt."""
        kept = [token for token in answer if token not in self._stops()]
        return torch.cat([torch.tensor(kept, dtype=torch.long), self.prompt.sequel])[: self.scored]

    def _force(self, cache: Any, ids: torch.Tensor, on_tokens: OnTokens) -> Iterator[torch.Tensor]:
        return feed_chunks(self.model, cache, ids, len(self.prompt.ids), _CHUNK, on_tokens)

    def _compare(self, name: str, fed: _Fed, base: list[torch.Tensor], run: Any) -> Answer:
        pairs = [
            (measures.token_kl(before, after), measures.agreement(before, after))
            for before, after in zip(base, run, strict=True)
        ]
        kl, agrees = (torch.cat(column) for column in zip(*pairs, strict=True))
        return Answer(
            recipe=name,
            holding=fed.holding,
            prefill_tokens_per_s=len(self.prompt.ids) / fed.prefill_seconds,
            decode_tokens_per_s=(len(fed.ids) - 1) / fed.decode_seconds if len(fed.ids) > 1 else 0.0,
            kl_mean=float(kl.mean()),
            top1=float(agrees.double().mean()),
            text=self.tokenizer.decode(fed.ids, skip_special_tokens=True),
            new_tokens=len(fed.ids),
        )
