"""The attention function "kvslim": reads packed handles, and serves plain tensors as sdpa would."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvslim.attention.reference import Score, dense_attention
from kvslim.errors import KVSlimError, PackedCacheError, UnsupportedModelError
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.handle import PackedStates


def register() -> None:
    """Make ``attn_implementation="kvslim"`` known to transformers, with its mask. Calling it again changes nothing."""
    compat.check_version()
    AttentionInterface.register(compat.NAME, attention)
    # without a mask function transformers passes no mask at all, and padding and windows would vanish silently
    AttentionMaskInterface.register(compat.NAME, sdpa_mask)


def enable(model: Any) -> Any:
    """Switch a loaded model to kvslim's attention and return it.

    Raises
    ------
    UnsupportedModelError
        The model's attention cannot read a packed cache.
    """
    register()
    compat.text_config(model)
    model.set_attn_implementation(compat.NAME)
    if model.config._attn_implementation != compat.NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} kept attention '{model.config._attn_implementation}'; it does not support other "
            "attention functions"
        )
    return model


@compat.uncompiled
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | PackedStates,
    value: torch.Tensor | PackedStates,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' interface wants it.

    Parameters
    ----------
    module : Module
        The attention layer.
    query : Tensor of shape (batch, heads, queries, head_dim)
    key, value : Tensor or PackedStates
        Plain for layers that the cache leaves to transformers, packed handles otherwise.
    attention_mask : Tensor of shape (batch, 1 or heads, queries, keys) or None
    scaling, softcap, s_aux, is_causal
        As transformers passes them.

    Returns
    -------
    (Tensor of shape (batch, queries, heads, value_head_dim), None)
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    score = Score(scaling, softcap, s_aux)
    if not isinstance(key, PackedStates) and not isinstance(value, PackedStates):
        if softcap is not None or s_aux is not None:  # sdpa refuses the one and ignores the other
            out = dense_attention(query, key, value, attention_mask, score, causal=causal)
            return out.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if not isinstance(key, PackedStates) or not isinstance(value, PackedStates):
        raise PackedCacheError("keys and values must come from the same packed layer; one of them is a plain tensor")
    if kwargs.get("position_bias") is not None:
        raise PackedCacheError("position_bias is not supported on a packed cache; use transformers' DynamicCache")
    layer = key.layer
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:  # several positions per token (image grids)
        positions = None
    try:
        layer.claim(module)
        if layer.length == 0 and softcap is None and s_aux is None and layer.pending is not None:
            # nothing is stored yet: the chunk attends to itself exactly, in transformers' own way
            out, _ = sdpa_attention_forward(
                module, query, *layer.pending, attention_mask, scaling=scaling, is_causal=is_causal
            )
            layer.settle(query, attention_mask, positions)
            return out, None
        out = layer.attend(query, attention_mask, score, causal=causal, positions=positions)
    except KVSlimError:
        layer.take_back()
        raise
    return out.transpose(1, 2).contiguous(), None
