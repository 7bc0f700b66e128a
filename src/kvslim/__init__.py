"""kvslim: the KV cache in 2-8 bits per value, and attention on the packed bytes.

>>> import kvslim
>>> model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kvslim")   # or kvslim.enable(model)
>>> cache = kvslim.KVCache(model, "slim4")
>>> model.generate(**inputs, past_key_values=cache, max_new_tokens=200)
>>> print(cache.report())
"""

from __future__ import annotations

from typing import Any

from kvslim.integrations.registration import register_when_loaded

__version__ = "0.1.0"
__all__ = ["KVCache", "KVSlimError", "Recipe", "enable"]

_LAZY = {
    "KVCache": "kvslim.integrations.transformers",
    "enable": "kvslim.integrations.transformers",
    "KVSlimError": "kvslim.errors",
    "Recipe": "kvslim.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvslim' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


register_when_loaded()
