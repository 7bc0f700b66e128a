"""Quality of recipes by the protocol: divergence from the 16-bit cache, and the bytes it was bought with.

Everything runs through `KVCache` and the registered attention function, as in `generate`; nothing is simulated. Peers
go through the same forward pass: the attention function serves their plain tensors as sdpa does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvslim.errors import InputError
from kvslim.eval import measures
from kvslim.eval.baseline import Baseline
from kvslim.eval.contestants import Contestant, Held
from kvslim.eval.forced import feed, feed_chunks
from kvslim.eval.measures import Scores
from kvslim.eval.peers import Peer
from kvslim.eval.protocol import Protocol
from kvslim.eval.shared_prefill import SharedPrefill, can_share
from kvslim.eval.shelf import Shelf
from kvslim.eval.text import Text
from kvslim.eval.versions import versions
from kvslim.integrations.transformers import KVCache
from kvslim.recipe import Recipe


@dataclass(frozen=True)
class Quality:
    """One recipe or peer, measured.

    Attributes
    ----------
    recipe : str
        As it was asked for; the name, if it is a peer.
    bits_per_value, bits_per_value_packed : float
        Of everything held at the end of a passage, and of the tokens in sealed blocks alone.
    nbytes, nbytes_16bit : int
        Held at the end of a passage, and what 16 bits would take.
    kl_mean, kl_p99, kl_p999 : float
        KL(base || quantized) over the scored tokens of all passages, in nats.
    top1 : float
        Share of tokens where both put the same token first.
    ppl, ppl_ratio : float
        Perplexity, and that divided by the baseline's. It moves by 5 % from passage to passage: rank by KL and top-1.
    kl_each : tuple of float
        Mean per passage.
    kl_trimmed : float
        Mean without the top 1 % of tokens.
    """

    recipe: str
    bits_per_value: float
    bits_per_value_packed: float
    nbytes: int
    nbytes_16bit: int
    kl_mean: float
    kl_p99: float
    kl_p999: float
    top1: float
    ppl: float
    ppl_ratio: float
    kl_each: tuple[float, ...]
    kl_trimmed: float

    @classmethod
    def of(cls, contestant: Contestant, passages: Sequence[Scores], held: Held) -> Quality:
        """Sum up the passages of one recipe; `held` is that of the last one, and all hold equally many tokens."""
        scores = Scores.join(list(passages))
        ppl = measures.perplexity(scores.surprise)
        return cls(
            recipe=contestant.name,
            bits_per_value=held.bits_per_value,
            bits_per_value_packed=held.bits_per_value_packed,
            nbytes=held.nbytes,
            nbytes_16bit=held.nbytes_16bit,
            kl_mean=float(scores.kl.mean()),
            kl_p99=measures.percentile(scores.kl, 99),
            kl_p999=measures.percentile(scores.kl, 99.9),
            top1=float(scores.agrees.double().mean()),
            ppl=ppl,
            ppl_ratio=ppl / measures.perplexity(scores.base_surprise),
            kl_each=tuple(float(passage.kl.mean()) for passage in passages),
            kl_trimmed=measures.trimmed_mean(scores.kl),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, keys with their units."""
        return {**asdict(self), "kl_each": list(self.kl_each)}


def measure_quality(
    model: Any,
    ids: torch.Tensor,
    recipes: Sequence[str | Recipe],
    protocol: Protocol | None = None,
    *,
    peers: Sequence[Peer] = (),
    shelf: Shelf | None = None,
    on_tokens: Callable[[int], object] = lambda _: None,
) -> list[Quality]:
    """Measure recipes on a model, passage by passage, so that one passage's baseline is in memory at a time.

    Parameters
    ----------
    model : PreTrainedModel
        Already on kvslim's attention.
    ids : Tensor of shape (tokens,)
        The whole text, tokenized without special tokens.
    recipes : sequence of str or Recipe
    protocol : Protocol, optional
    peers : sequence of Peer
        Measured after the recipes.
    shelf : Shelf, optional
        Where baselines are remembered; without it they are made again each time.
    on_tokens : callable
        Called with the number of tokens done, now and then; see `total_tokens`.

    Returns
    -------
    list of Quality
        In the order of `recipes`, then `peers`.

    Raises
    ------
    InputError
        The text is too short, the passages do not fit into the model's context, or there is no recipe.
    """
    protocol = protocol or Protocol()
    contestants = [Contestant.of_recipe(Recipe.parse(recipe)) for recipe in recipes]
    contestants += [Contestant.of_peer(peer) for peer in peers]
    if not contestants:
        raise InputError("no recipe to measure; name at least one, see `kvslim recipes`")
    protocol.check_context(model.config)
    passages = protocol.passages(ids)
    baseline = Baseline(model, protocol, shelf)
    scores: list[list[Scores]] = [[] for _ in contestants]
    held: list[Held] = []
    for passage in passages:
        base = baseline.log_probs(passage, on_tokens)
        caches = [contestant.new_cache(model) for contestant in contestants]
        store_shared(model, caches, passage, protocol, on_tokens)
        held = []
        for found in scores:
            cache = caches.pop(0)  # freed when it is scored
            found.append(score_passage(model, cache, passage, base, protocol, on_tokens))
            held.append(Held.of(cache))
    return [Quality.of(*row) for row in zip(contestants, scores, held, strict=True)]


def store_shared(
    model: Any,
    caches: Sequence[Any],
    passage: torch.Tensor,
    protocol: Protocol,
    on_tokens: Callable[[int], object],
) -> None:
    """Store the first part of a passage in all packed caches by one pass, where there are several that can share it."""
    packed = [cache for cache in caches if isinstance(cache, KVCache)]
    if len(packed) > 1 and can_share(packed):
        stored = passage[: protocol.prefill]
        feed(model, SharedPrefill(packed), stored, protocol.offset_positions, keep=1)
        on_tokens(len(stored) * len(packed))


def score_passage(
    model: Any,
    cache: Any,
    passage: torch.Tensor,
    base: list[torch.Tensor],
    protocol: Protocol,
    on_tokens: Callable[[int], object],
) -> Scores:
    """Compare the second part of a passage with the baseline, chunk by chunk; an empty cache is fed the first.

    `base` has the baseline's log-probabilities by chunk.
    """
    stored, scored = passage[: protocol.prefill], passage[protocol.prefill : -1]
    if not cache.get_seq_length():
        feed(model, cache, stored, protocol.offset_positions, keep=1)
        on_tokens(len(stored))
    position = protocol.offset_positions + len(stored)
    logits = feed_chunks(model, cache, scored, position, protocol.chunk, on_tokens)
    targets = passage[protocol.prefill + 1 :].split(protocol.chunk)
    parts = [
        Scores.of(before, measures.log_probs(after), target.to(after.device))
        for before, after, target in zip(base, logits, targets, strict=True)
    ]
    return Scores.join(parts)


def total_tokens(protocol: Protocol, recipes: int) -> int:
    """Tokens that `measure_quality` reports to `on_tokens` altogether."""
    return protocol.prefixes * (recipes + 1) * (protocol.prefill + protocol.score)


def result(
    model_name: str, text: Text, tokens: int, protocol: Protocol, rows: list[Quality], peers: Sequence[Peer] = ()
) -> dict[str, Any]:
    """All of an evaluation as plain values, with what is needed to repeat it."""
    return {
        "model": model_name,
        "text": {"name": text.name, "sha256": text.sha256, "tokens": tokens},
        "protocol": {**protocol.to_dict(), "offsets": protocol.offsets(tokens)},
        "versions": versions(peers),
        "rows": [row.to_dict() for row in rows],
    }


def tokenize(tokenizer: Any, text: Text) -> torch.Tensor:
    """Token ids of a whole text, shape (tokens,); passages start mid-text, so no special tokens are added."""
    ids = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)
