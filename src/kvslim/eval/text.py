"""Texts to measure on: a file of the user's, or the language reference that ships with Python."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from kvslim.errors import InputError


@dataclass(frozen=True)
class Text:
    """A text under a name that holds no path, so that it may stand in a result."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """First 16 hexadecimal digits of the content's SHA-256."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]


def load_text(path: Path | None) -> Text:
    """Read a text file, or Python's own documentation where `path` is None.

    Raises
    ------
    InputError
        The file is missing, unreadable, empty or not UTF-8.
    """
    if path is None:
        return python_docs()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the text {path}: {error}; give a UTF-8 text file with --text") from error
    if not content.strip():
        raise InputError(f"the text {path} is empty; give a UTF-8 text file with --text")
    return Text(path.name, content)


def python_docs() -> Text:
    """The language reference as `help()` shows it: about 100,000 tokens of English, tables and code."""
    topics = python_topics()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Text(f"python-{version}-docs", "\n\n".join(topics[name] for name in sorted(topics)))


def python_topics() -> dict[str, str]:
    """Topic name -> text of the language reference.

    Raises
    ------
    InputError
        This Python comes without its documentation topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError("this Python comes without pydoc_data.topics to take text from; use another Python") from error
    return topics
