"""Build hook: compiles the CPU kernels into the package. Without a compiler the package is built without them."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the shared objects beside the module that loads them, with the digest of the sources they belong to."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root) / "src" / "kvslim" / "kernels" / "cpu"
        spec = importlib.util.spec_from_file_location("kvslim_native_build", package / "build.py")
        assert spec is not None and spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        library = package / "lib"
        shutil.rmtree(library, ignore_errors=True)
        try:
            native.build(library)
        except (native.BuildError, OSError) as error:
            shutil.rmtree(library, ignore_errors=True)
            self.app.display_warning(f"kvslim is built without native CPU kernels: {error}")
            return
        (library / "digest").write_text(native.digest() + "\n", encoding="utf-8")
        build_data["artifacts"] += ["src/kvslim/kernels/cpu/lib/*"]
        # plain shared objects behind a C interface: one wheel serves every Python of a platform
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
