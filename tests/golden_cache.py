"""The golden file of each format version: a tiny cache as that version wrote it, and what a model says after it.

    python tests/golden_cache.py        writes the files of the present version; those of older ones are never written again

The model's weights come from Python's own generator, so that they are the same whatever torch and transformers do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import kvslim
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.saving import KIND
from kvslim.transforms.dense import gaussian

FOLDER = Path(__file__).parent / "golden"
PROMPT = [[0, 0, 0, 5, 9, 2, 7, 11, 3, 1, 8, 14, 6, 4, 13, 10, 2, 12, 15, 3, 9, 5, 1, 7, 6, 11],
          [4, 1, 3, 2, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 15, 1, 5, 3, 7, 9, 2, 4, 8, 6, 10, 14]]  # fmt: skip
ORDER = [1, 1, 0]
NEXT = [[3, 5, 8, 13, 2, 1, 4, 7, 11], [9, 6, 12, 15, 1, 14, 10, 2, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2]]
RECIPE = "slim4+block=8+sinks=2+recent=3"


def model() -> Any:
    """A three-layer Gemma 3, two layers with a window of 8 tokens."""
    config = Gemma3TextConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=128,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    made = Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(made.named_parameters())):
            scale = 0.3 if weight.ndim > 1 else 0.1
            weight.copy_(scale * gaussian(1, weight.numel(), 100 + number).view(weight.shape) + ("norm" in name) * 0.1)
    return kvslim.enable(made)


def cache_of(made: Any, recipe: str = RECIPE) -> kvslim.KVCache:
    """Three sequences, one padded, two that share blocks, after a crop into a block."""
    cache = kvslim.KVCache(made, recipe)
    ids = torch.tensor(PROMPT)
    cache.activate_past_recording()
    feed(made, cache, ids, (ids > 0).long())
    cache.crop(-5)
    cache.reorder_cache(torch.tensor(ORDER))
    return cache


def feed(made: Any, cache: kvslim.KVCache, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of tokens (batch, tokens) after what is in the cache."""
    with torch.no_grad():
        return made(ids, attention_mask=mask, use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits


def after(made: Any, cache: kvslim.KVCache) -> torch.Tensor:
    """Logits of `NEXT`, token by token, after the golden cache: (3, 9, vocabulary)."""
    more = torch.tensor(NEXT)
    mask = torch.cat([(torch.tensor(PROMPT)[ORDER, :-5] > 0).long(), torch.ones_like(more)], dim=1)
    held, steps = mask.shape[1] - more.shape[1], range(more.shape[1])
    logits = [feed(made, cache, more[:, at : at + 1], mask[:, : held + at + 1]) for at in steps]
    return torch.cat(logits, dim=1)


def main() -> None:
    """Write the present version."""
    made = model()
    cache = cache_of(made)
    ids = torch.tensor(PROMPT)[ORDER, :-5]
    cache.save(FOLDER / f"cache-v{KIND.version}.safetensors", ids=ids, notes={"by": "golden_cache.py"})
    rounded = [[[round(value, 4) for value in token] for token in row] for row in after(made, cache).tolist()]
    text = json.dumps({"logits": rounded})
    (FOLDER / f"cache-v{KIND.version}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
