"""Fingerprint of a model: which weights and config a file made from it belongs to."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_SAMPLES = 64  # values per tensor: enough to tell two checkpoints apart, and all of a large model in a second
_IGNORED = ("_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation")


def fingerprint(model: Any) -> str:
    """Hash of the config and of a few values of every weight; 32 hexadecimal digits.

    Neither the folder a model was loaded from nor its attention implementation matters; its dtype does.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _IGNORED}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(_sample(weight))
    return digest.hexdigest()[:32]


def _sample(weight: torch.Tensor) -> bytes:
    flat = weight.detach().reshape(-1)
    picked = flat[:: max(1, len(flat) // _SAMPLES)].cpu().contiguous()
    return picked.view(torch.uint8).numpy().tobytes()
