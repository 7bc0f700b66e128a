"""What a result was made with, so that it can be repeated."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

import torch
import transformers

import kvslim
from kvslim.eval.peers import Peer


def versions(peers: Iterable[Peer] = ()) -> dict[str, str]:
    """Versions of kvslim and of everything that decides a figure; packages of peers only where one took part."""
    packages = dict.fromkeys(peer.package for peer in peers if peer.package)
    return {
        "kvslim": kvslim.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }
