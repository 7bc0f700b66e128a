"""Every error kvslim raises on purpose. Messages say what, got, allowed and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVSlimError(Exception):
    """Base of all errors that kvslim raises on purpose; the CLI prints it and exits with code 2."""


class InputError(KVSlimError, ValueError):
    """A value handed to kvslim cannot be used."""


class RecipeError(InputError):
    """A recipe string or one of its parts is not understood."""


class ModelFileError(InputError):
    """A model file or folder is missing, truncated or foreign."""


class ResultFileError(InputError):
    """A file of results is damaged, belongs to another evaluation, or cannot be written."""


class StateFileError(InputError):
    """A file that kvslim keeps state in (a cache, a calibration) is damaged, foreign, or cannot be written."""


class FetchError(KVSlimError):
    """A download did not succeed; what was there before is untouched."""


class UnsupportedModelError(KVSlimError):
    """A model or one of its layers cannot hold a packed KV cache."""


class PackedCacheError(KVSlimError, RuntimeError):
    """Packed keys or values reached code that wants plain tensors."""


class StateError(KVSlimError, RuntimeError):
    """An operation does not fit the cache's present state; nothing was changed."""


class ConformanceError(KVSlimError, AssertionError):
    """A codec or recipe breaks what every codec or recipe must keep; lists each failed check."""


class PackingWarning(UserWarning):
    """A recipe that is known to fail on keys like this model's is in use."""


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest allowed name, or an empty string."""
    close = difflib.get_close_matches(got.lower(), list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
