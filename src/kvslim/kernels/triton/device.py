"""Which target a GPU is, and why kernels do not run on it."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

from kvslim.kernels.triton.targets import TARGETS, Target

_OLDEST = (3, 4)  # the first with functions of constants
# architectures that run what is compiled for another one's limits
_LIKE = {
    "sm_87": "sm_86",
    "sm_103": "sm_100",
    "sm_121": "sm_120",
    "gfx1101": "gfx1100",
    "gfx1102": "gfx1100",
    "gfx1150": "gfx1151",
    "gfx1152": "gfx1151",
    "gfx1200": "gfx1201",
}


def device_target(device: torch.device) -> Target | str:
    """Return the target of a GPU, or why the kernels do not run on it."""
    if device.type != "cuda":
        return f"{device.type} is no GPU that triton compiles for"
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'kvslim[triton]')"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST:
        return f"triton {triton.__version__} is too old (3.4 or newer; it comes with torch 2.8)"
    return target_called(architecture(device))


def target_called(name: str) -> Target | str:
    """Return the target of an architecture, or why there is none."""
    found = TARGETS.get(_LIKE.get(name, name))
    return found or f"{name} is none of {', '.join(TARGETS)}"


@lru_cache(maxsize=16)
def architecture(device: torch.device) -> str:
    """Name of a GPU's architecture: ``sm_90``, ``gfx1100``."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
