"""What a result was made with, so that it can be repeated."""

from __future__ import annotations

import platform

import torch
import transformers

import kvslim


def versions() -> dict[str, str]:
    """Versions of kvslim and of everything that decides a figure."""
    return {
        "kvslim": kvslim.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
