"""The `kvslim` command: one file per verb, and one place that turns errors into a message and an exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

_BAD_INPUT, _INTERRUPTED = 2, 130


def main() -> NoReturn:
    """Run the command line; an error that kvslim raises on purpose ends it with code 2 and no traceback."""
    from rich.console import Console

    from kvslim.cli.app import app
    from kvslim.errors import KVSlimError

    try:
        app(prog_name="kvslim")
    except KVSlimError as error:
        Console(stderr=True).print(f"kvslim: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(_BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    sys.exit(0)
