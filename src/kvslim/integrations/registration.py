"""Register with transformers when transformers is loaded, not before: ``import kvslim`` stays light.

Importing transformers' model code takes seconds. So the registration waits for ``transformers.modeling_utils``, which
every ``from_pretrained`` imports before it looks at ``attn_implementation``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

_WATCHED = "transformers.modeling_utils"


def register_when_loaded() -> None:
    """Register now if transformers' model code is loaded, else right after it is."""
    if _WATCHED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _register() -> None:
    # the package registers as its last step; where it is itself what loads transformers, that step is still to come
    importlib.import_module("kvslim.integrations.transformers")


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds `_WATCHED` as everyone else would, and has the registration run after it was executed."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
