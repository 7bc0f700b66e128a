"""Every version check and private name of transformers that kvslim leans on, in one place."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, get_layer_types_and_kwargs

from kvslim.errors import UnsupportedModelError

OLDEST = "5.19"
NAME = "kvslim"  # attention implementation; must not start with "flash" nor contain "sdpa", "flex_attention", "paged|", "/"

# Model types whose attention takes keys and values apart between cache.update() and the attention function (latent
# attention that expands a compressed cache, indexers, per-head splits), so packed handles cannot pass through.
INDEXES_KV = frozenset(
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots3_note glm4_moe_lite glm5_next "
    "glm_moe_dsa hy_v4 hy_v4_vl inkling jetmoe kimi_linear longcat_flash minicpm3 minimax_m3_vl mistral4 mistral_large4 "
    "nemotron_asr_streaming youtu".split()
)
# Layer kinds whose plain full-attention cache can be replaced by a packed one.
PACKED_KINDS = ("full_attention",)


def check_version() -> None:
    """Raise UnsupportedModelError on a transformers older than `OLDEST`."""
    if Version(transformers.__version__) < Version(OLDEST):
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} is too old; kvslim needs {OLDEST} or newer: pip install -U transformers"
        )


def text_config(model_or_config: Any) -> Any:
    """Return the decoder's text config of a model or config; refuses what cannot hold a packed cache, by name."""
    config = getattr(model_or_config, "config", model_or_config)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"expected a transformers model or config, got {type(model_or_config).__name__}; pass the model itself"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type}: encoder-decoder models are not supported; kvslim packs decoder-only caches"
        )
    text = config.get_text_config(decoder=True)
    for each in (config, text):
        if each.model_type in INDEXES_KV:
            raise UnsupportedModelError(
                f"{each.model_type}: its attention takes cached keys and values apart before the attention function "
                "(latent or indexed attention), so a packed cache cannot be read there; use transformers' DynamicCache"
            )
    if hasattr(model_or_config, "forward") and not getattr(model_or_config, "_supports_attention_backend", True):
        raise UnsupportedModelError(
            f"{type(model_or_config).__name__} does not use transformers' attention interface, so it cannot read a packed "
            "cache; use transformers' DynamicCache"
        )
    return text


def layer_kinds(config: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Return (kind, constructor arguments, reason it cannot be packed or '') per layer."""
    kinds, arguments = get_layer_types_and_kwargs(config)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    found = []
    for kind, args, mode in zip(kinds, arguments, modes, strict=True):
        if mode == "store":
            reason = "its keys and values are read by other layers"
        elif kind not in PACKED_KINDS:
            reason = kind.replace("_", " ")
        elif DYNAMIC_LAYER_TYPE_MAPPING.get(kind) is not DynamicLayer:
            reason = f"'{kind}' is remapped by another library"
        else:
            reason = ""
        found.append((kind, args, reason))
    return found


def framework_layer(kind: str, arguments: dict[str, Any]) -> Any:
    """Build the framework's own dynamic cache layer for `kind`."""
    if kind not in DYNAMIC_LAYER_TYPE_MAPPING:
        known = ", ".join(DYNAMIC_LAYER_TYPE_MAPPING)
        raise UnsupportedModelError(f"layer kind '{kind}' is unknown to this transformers; it knows {known}")
    return DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments)


def rollback_refusal(layer: Any, count: int) -> str:
    """Why the framework's own `layer` cannot give up `count` tokens, or ''."""
    if not getattr(layer, "is_croppable", False):
        return f"{type(layer).__name__} cannot be cropped"
    window = getattr(layer, "sliding_window", None)
    if window is not None and count and layer.get_seq_length() >= window and not getattr(layer, "record_past", False):
        return f"a sliding layer past its window of {window} keeps no older tokens; call activate_past_recording() first"
    return ""
