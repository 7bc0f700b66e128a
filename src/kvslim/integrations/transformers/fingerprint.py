"""Fingerprint of a model: which weights and config a file made from it belongs to."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_SAMPLES = 64  # values per tensor: enough to tell two checkpoints apart, and all of a large model in a second
# where a model came from, how it is run, and what saving it writes into its config; the weights tell their dtype
_IGNORED = frozenset(
    {"_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation", "architectures", "dtype"}
)


def fingerprint(model: Any) -> str:
    """Hash of the config and of a few values of every weight; 32 hexadecimal digits.

    Neither the folder a model was loaded from nor its attention implementation matters; its dtype does.
    """
    config = _telling(model.config.to_dict())
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(_sample(weight))
    return digest.hexdigest()[:32]


def _telling(config: Any) -> Any:
    """Return a config, and those within it, without what does not matter."""
    if not isinstance(config, dict):
        return config
    return {name: _telling(value) for name, value in config.items() if name not in _IGNORED}


def _sample(weight: torch.Tensor) -> bytes:
    flat = weight.detach().reshape(-1)
    picked = flat[:: max(1, len(flat) // _SAMPLES)].cpu().contiguous()
    return picked.view(torch.uint8).numpy().tobytes()
