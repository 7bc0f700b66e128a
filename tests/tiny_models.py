"""Tiny random models of real families, each twice over the same weights: on kvslim's attention and on transformers' own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers

import kvslim

VOCAB = 61
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,  # wide, so that what is attended to decides the next token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # else Gemma's scaled embeddings only repeat the last token
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),  # `build` gives two layers key biases of the size of the real ones
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 12}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 12,
            "layer_types": _MIXED,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 12, "layer_types": _MIXED, "num_key_value_heads": 1, "query_pre_attn_scalar": 32},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
            "initializer_range": 0.15,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_multiple_of": 16,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": [
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_kv_shared_layers": 2,
            "sliding_window": 12,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 5,
            "intermediate_size": [32] * 5,
        },
    ),
}
FAMILIES = tuple(_CONFIGS)
# families that stand for a kind of layer or attention of their own; test_layer_kinds.py runs these
_NO_ROPE = {"no_rope_layers": [1, 0, 1]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1}
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 12, "layer_types": _MIXED, "logit_scale": 1.0}),
    "smollm3": ("SmolLM3Config", _NO_ROPE),
    "phi3": ("Phi3Config", {}),
    "granite": ("GraniteConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "opt": ("OPTConfig", {"ffn_dim": 32, "word_embed_proj_dim": 48}),
    "llama4": (
        "Llama4TextConfig",
        {
            **_NO_ROPE,
            "attention_chunk_size": 12,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 32,
            "moe_layers": [],
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "use_mamba_kernels": False,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], **_MAMBA}),
    "falcon-h1": ("FalconH1Config", {**_MAMBA, "mamba_d_ssm": 96}),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": ["full_attention", "sliding_attention"] * 3,
            "sliding_window": 12,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
}
WINDOWED = ("mistral-sliding", "gemma2", "gemma3", "gpt-oss", "gemma3n")
LINEAR = ("qwen3-next", "lfm2")


def config_of(family: str, **changes: Any) -> Any:
    """Fresh configuration of a family."""
    name, settings = (_CONFIGS | _MORE)[family]
    return getattr(transformers, name)(**{**_COMMON, **settings, **changes})


def build(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Random model on kvslim's attention."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(family, **changes), attn_implementation="eager"
    ).eval()
    if family == "qwen2":
        for index in (0, 2):
            bias = model.model.layers[index].self_attn.k_proj.bias
            with torch.no_grad():
                bias.copy_(torch.randn(bias.shape) * 10)
    if family == "gpt-oss":
        for layer in model.model.layers:
            with torch.no_grad():
                layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 4))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    model.requires_grad_(False)
    return kvslim.enable(model)


@functools.cache
def pair(family: str) -> tuple[Any, Any]:
    """The same model on kvslim's attention and on "eager"; tests must leave both as they are."""
    packed = build(family)
    stock = copy.deepcopy(packed)
    stock.set_attn_implementation("eager")
    return packed, stock


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids without the padding id."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of prompts of different length, padding first."""
    width = max(lengths)
    ids = prompt(len(lengths), width, seed)
    mask = torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()
