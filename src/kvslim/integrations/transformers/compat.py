"""Every version check and private name of transformers that kvslim leans on, in one place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationMixin, cache_utils
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from kvslim.cache import build_packers
from kvslim.errors import InputError, UnsupportedModelError
from kvslim.recipe import Recipe

OLDEST = "5.19"
# Name of the attention implementation; must not start with "flash" nor contain "sdpa", "flex_attention", "paged|", "/".
NAME = "kvslim"

# What forward() and generate() call the cache; newer versions warn about the older name.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Model types whose attention takes keys and values apart between cache.update() and the attention function (latent
# attention that expands a compressed cache, indexers, per-head splits, images), so packed handles cannot pass through.
INDEXES_KV = frozenset(
    {
        "axk1",
        "axk2",
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "diffllama",
        "doge",
        "dots3_note",
        "git",
        "glm4_moe_lite",
        "glm5_next",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl",
        "idefics",
        "inkling",
        "jetmoe",
        "kimi_linear",
        "longcat_flash",
        "minicpm3",
        "minimax_m3_vl",
        "mistral4",
        "mistral_large4",
        "mllama",
        "mllama_text_model",
        "nemotron_asr_streaming",
        "youtu",
    }
)
# Model types whose forward accepts only a cache class of their own.
OWN_CACHE = frozenset({"minimax"})
SKIPPED = "skipped on request"  # reason of a layer that the caller left out
# Layer kinds whose plain full-attention cache can be replaced by a packed one.
PACKED_KINDS = ("full_attention",)

# torch.compile breaks its graph at what carries this, and says why under fullgraph=True: packed bytes are read by
# kernels that it cannot see into. The rest of the model is compiled as ever.
uncompiled = torch.compiler.disable(reason="kvslim reads and writes packed bytes outside compiled graphs")


def check_version() -> None:
    """Raise UnsupportedModelError on a transformers older than `OLDEST`."""
    if Version(transformers.__version__) < Version(OLDEST):
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} is too old; kvslim needs {OLDEST} or newer: pip install -U "
            "transformers"
        )


def context_limit(config: Any) -> int | None:
    """Tokens a model was made for, or None if its config does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


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
                "(latent or indexed attention, images); it cannot read a packed cache: use transformers' DynamicCache"
            )
        if each.model_type in OWN_CACHE:
            raise UnsupportedModelError(
                f"{each.model_type}: its forward takes only a cache class of its own, so it cannot be given a packed "
                "cache; call it without one"
            )
    # `_supports_attention_backend` would be too strict: many hybrids (Qwen3-Next, Jamba) leave it unset
    uses_interface = getattr(model_or_config, "_can_set_attn_implementation", None)
    if uses_interface is not None and not uses_interface():
        raise UnsupportedModelError(
            f"{type(model_or_config).__name__} does not use transformers' attention interface, so it cannot read a "
            "packed "
            "cache; use transformers' DynamicCache"
        )
    return text


def layer_kinds(config: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Return (kind, constructor arguments, reason it cannot be packed or '') per layer."""
    kinds, arguments = get_layer_types_and_kwargs(config)
    modes = _sharing_modes(config, kinds)
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


def _sharing_modes(config: Any, kinds: list[str]) -> list[str | None]:
    """Per cached layer, ``store`` where later layers read its keys and values.

    Where a config has no modes (transformers 5.19), it says how many last layers have none of their own; these read
    those of the last layer of their kind before them, and have no place in the cache.
    """
    modes = getattr(config, "kv_sharing_modes", None)
    if modes:
        return list(modes)
    found: list[str | None] = [None] * len(kinds)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    for kind in set(config.layer_types[-shared:]) if shared else ():
        found[len(kinds) - 1 - kinds[::-1].index(kind)] = "store"
    return found


def framework_layer(kind: str, arguments: dict[str, Any]) -> Any:
    """Build the framework's own dynamic cache layer for `kind`."""
    if kind not in DYNAMIC_LAYER_TYPE_MAPPING:
        known = ", ".join(DYNAMIC_LAYER_TYPE_MAPPING)
        raise UnsupportedModelError(f"layer kind '{kind}' is unknown to this transformers; it knows {known}")
    return DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments)


def shape_config(config: Any) -> Any:
    """Copy of a config whose model runs on tensors without data, on implementations that never look at values."""
    copied = copy.deepcopy(config)
    for each in (copied, copied.get_text_config(decoder=True)):
        each._attn_implementation, each._experts_implementation = "eager", "batched_mm"
    return copied


def linear_states(layer: Any) -> list[torch.Tensor]:
    """Convolution and recurrent states of the framework's own `layer`; empty where it is not a linear one."""
    groups = (getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states"))
    return [state for group in groups for state in group.values() if state is not None]


def rotary_share(config: Any) -> float:
    """Share of a head's channels that rotary positions turn."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0)


def quantized_layer(backend: str, **arguments: int) -> Any:
    """Build a layer of transformers' own `QuantizedCache`; `backend` is quanto, hqq or fp8."""
    name = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}[backend]
    if not hasattr(cache_utils, name):
        raise InputError(
            f"transformers {transformers.__version__} has no quantized cache '{backend}'; pip install -U transformers"
        )
    return getattr(cache_utils, name)(**arguments)


def check_head_dim(recipe: Recipe, index: int, config: Any) -> None:
    """Raise RecipeError where a layer's head_dim and the recipe do not fit, before a single token is computed."""
    layer = config.per_layer_config[index] if hasattr(config, "per_layer_config") else config
    head_dim = getattr(layer, "head_dim", None)
    if head_dim is None and hasattr(layer, "hidden_size") and hasattr(layer, "num_attention_heads"):
        head_dim = layer.hidden_size // layer.num_attention_heads
    if head_dim is None:
        return  # unusual names: the first token tells
    build_packers(recipe, index, (head_dim, head_dim), "fp16")


def update_layer(
    layer: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[Any, Callable[[], None] | None]:
    """Update the framework's own `layer`; return its answer, and what takes the update back (None: nothing can)."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        return layer.update(key, value, *args, **kwargs), None
    fresh, count = not layer.is_initialized, key.shape[-2]
    plain = {name: attribute for name, attribute in vars(layer).items() if name not in ("keys", "values")}
    states = layer.update(key, value, *args, **kwargs)
    # whichever is longer holds the old states whole (a sliding layer answers with more than it keeps), at no cost: what
    # the layer keeps is a view of it
    whole = states if states[0].shape[-2] > layer.keys.shape[-2] else (layer.keys, layer.values)

    def undo() -> None:
        if fresh:
            layer.reset()
            return
        vars(layer).update(plain)
        layer.keys, layer.values = (tensor[..., : tensor.shape[-2] - count, :] for tensor in whole)

    return states, undo


def is_linear(layer: Any) -> bool:
    """Whether a cache layer keeps a state of linear attention, alone or beside keys and values."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def rollback_refusal(layer: Any, count: int) -> str:
    """Why the framework's own `layer` cannot give up `count` tokens, or ''."""
    if not getattr(layer, "is_croppable", False):
        return f"{type(layer).__name__} cannot be cropped"
    recorded = getattr(layer, "record_past", False)
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not recorded:
        return f"{type(layer).__name__} keeps no earlier state; call activate_past_recording() first"
    window = getattr(layer, "sliding_window", None)
    if window is None or not count or layer.get_seq_length() < window:
        return ""
    if not recorded:
        return (
            f"a sliding layer past its window of {window} keeps no older tokens; call activate_past_recording() first"
        )
    needed = min(window - 1, layer.get_seq_length() - count)
    if layer.keys.shape[-2] - count < needed:
        return f"a sliding layer recorded only {layer.keys.shape[-2]} tokens, and {count + needed} are needed"
    return ""
