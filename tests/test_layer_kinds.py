"""Each kind of layer in a real family: packed, left to transformers with its reason, or refused by name; docs/layers.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvslim
from kvslim.errors import UnsupportedModelError
from kvslim.integrations.transformers import compat
from test_operations import forward
from tiny_models import config_of, pair, prompt

PAGE = (Path(__file__).parents[1] / "docs" / "layers.md").read_text(encoding="utf-8")
SMALL = "none+block=8+sinks=2+recent=5"
TOLERANCE = 2e-4
SLIDING, CHUNKED, LINEAR, HYBRID = "sliding attention", "chunked attention", "linear attention", "hybrid"
SHARED, DUMMY = "its keys and values are read by other layers", "dummy"

# what the page calls it -> families: why each layer is not packed ("" where it is)
KINDS: dict[str, dict[str, list[str]]] = {
    "full attention": {
        "llama": [""] * 3,
        "mistral": [""] * 3,
        "mixtral": [""] * 3,
        "granite": [""] * 3,
        "phi3": [""] * 3,
    },
    "key biases": {"qwen2": [""] * 3, "opt": [""] * 3},
    "QK-norm": {"qwen3": [""] * 3},
    "layers without RoPE": {"smollm3": [""] * 3},
    "sliding window": {
        "mistral-sliding": [SLIDING] * 3,
        "gemma3": [SLIDING, "", SLIDING],
        "cohere2": [SLIDING, "", SLIDING],
    },
    "softcap": {"gemma2": [SLIDING, "", SLIDING]},
    "attention sinks": {"gpt-oss": ["", SLIDING, ""]},
    "chunked attention": {"llama4": [CHUNKED, "", CHUNKED]},
    "linear attention": {
        "qwen3-next": [LINEAR, "", LINEAR, ""],
        "jamba": [LINEAR, "", LINEAR],
        "bamba": [LINEAR, "", LINEAR],
        "lfm2": ["conv", "", "conv"],
    },
    "attention and recurrence in one layer": {"falcon-h1": [HYBRID] * 3},
    "shared keys and values": {"gemma3n": ["", SHARED, SHARED, DUMMY, DUMMY]},
    "head_dim that differs between layers": {"gemma4": ["", SLIDING, SHARED, SHARED, DUMMY, DUMMY]},
}
CASES = [(kind, family) for kind, families in KINDS.items() for family in families]

# what the page calls it -> config classes, and what the refusal says
REFUSED = {
    "latent attention": (["DeepseekV2Config", "DeepseekV3Config", "KimiLinearConfig"], "latent or indexed attention"),
    "encoder-decoder": (["T5Config", "BartConfig", "WhisperConfig"], "encoder-decoder models are not supported"),
    "images joined to the cached keys": (
        ["MllamaConfig", "IdeficsConfig", "GitConfig"],
        "takes cached keys and values apart",
    ),
    "a cache class of its own": (["MiniMaxConfig"], "takes only a cache class of its own"),
}


def expected(kind: str, family: str) -> list[str]:
    """Reasons as this transformers has them: in 5.19 layers that reuse keys and values have no place in the cache."""
    config, reasons = config_of(family), KINDS[kind][family]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if hasattr(config, "kv_sharing_modes") or not shared:
        return reasons
    modes = compat.layer_kinds(config)
    # a sliding layer that nobody reads there is left for its window
    return [reason and own for reason, (_, _, own) in zip(reasons[:-shared], modes, strict=True)]


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_each_layer_is_packed_or_says_why_not(kind, family):
    packed, _ = pair(family)
    cache = kvslim.KVCache(packed, SMALL)
    report, reasons = cache.report(), expected(kind, family)
    assert [("" if layer.packed else layer.reason) for layer in report.layers] == reasons
    for reason in set(reasons) - {""}:
        assert f": {reason}" in str(report)
    if any(reasons):
        with pytest.raises(UnsupportedModelError, match="strict: layer .* cannot be packed"):
            kvslim.KVCache(packed, SMALL, strict=True)
    else:
        kvslim.KVCache(packed, SMALL, strict=True)


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_16_bits_equal_transformers_own_cache(kind, family):
    """Past every window and chunk, in pieces, and after a reset."""
    packed, stock = pair(family)
    cache = kvslim.KVCache(packed, SMALL)
    for seed in range(2):
        plain, ids = DynamicCache(config=stock.config), prompt(2, 45, seed)
        for start, stop in ((0, 29), (29, 30), (30, 45)):
            got, want = (forward(m, ids[:, start:stop], c) for m, c in ((packed, cache), (stock, plain)))
            torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
        assert float(want.std()) > 0.1, "a model that says nothing would prove nothing"
        cache.reset()


@pytest.mark.parametrize(("kind", "family"), [(kind, next(iter(KINDS[kind]))) for kind in KINDS])
def test_a_packed_recipe_holds_what_it_says(kind, family):
    """Finite, near the plain logits at 8 bits, and every byte in the report."""
    packed, stock = pair(family)
    cache, ids = kvslim.KVCache(packed, "int8+block=8+sinks=2+recent=5"), prompt(1, 60)
    for start, stop in ((0, 50), (50, 60)):
        got = forward(packed, ids[:, start:stop], cache)
    want = forward(stock, ids)[:, 50:]
    assert float((got - want).abs().mean()) < 0.2 * float(want.std())
    report = cache.report()
    assert report.nbytes == cache.nbytes > 0


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (names, _) in REFUSED.items() for name in names])
def test_refused_at_construction_by_name(kind, name):
    config = getattr(transformers, name)()
    with pytest.raises(UnsupportedModelError, match=f"^{config.model_type}: .*{REFUSED[kind][1]}"):
        kvslim.KVCache(config, "int8")


def test_the_page_names_every_kind_with_its_families():
    for kind, families in KINDS.items():
        held = "packed" if not any(any(reasons) for reasons in families.values()) else None
        row = next((line for line in PAGE.splitlines() if line.startswith(f"| {kind} |")), "")
        assert row, f"docs/layers.md has no row '{kind}'"
        assert all(f"`{family}`" in row for family in families), row
        assert held is None or "| packed |" in row, row
    for kind, (names, _) in REFUSED.items():
        row = next((line for line in PAGE.splitlines() if line.startswith(f"| {kind} |")), "")
        assert "| refused |" in row, f"docs/layers.md has no row '{kind}'"
        assert all(f"`{getattr(transformers, name)().model_type}`" in row for name in names), row


def test_models_that_change_keys_after_the_cache_are_all_listed():
    """A family that takes keys apart between update() and the attention function must be refused, not fail half way."""
    assert {"mllama", "mllama_text_model", "idefics", "git", "deepseek_v3"} <= compat.INDEXES_KV
