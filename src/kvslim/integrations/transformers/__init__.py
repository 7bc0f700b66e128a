"""transformers: a packed `Cache`, the attention function that reads it, loading of models."""

from __future__ import annotations

from kvslim.integrations.transformers.adapter import KVCache
from kvslim.integrations.transformers.attention import enable, register

__all__ = ["KVCache", "enable", "register"]

register()
