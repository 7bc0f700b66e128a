"""Caches in files as `generate` and `chat` take and leave them: with token ids and the messages behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvslim.errors import InputError

if TYPE_CHECKING:
    from kvslim.cli.session import Session
    from kvslim.integrations.transformers import KVCache


@dataclass
class Past:
    """What came before the prompt.

    Attributes
    ----------
    cache : KVCache
    ids : list of int
        Tokens so far; the last one may not be in the cache yet.
    messages : list of dict, or None
        What the tokens say, where they came through a chat template.
    facts : dict or None
        File and tokens, for programs; None without a file.
    """

    cache: KVCache
    ids: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] | None = field(default_factory=list)
    facts: dict[str, Any] | None = None


def check_files(load: Path | None, save: Path | None) -> None:
    """Refuse what can be refused before a model is loaded and text is made."""
    from kvslim.files import Contents, check_target
    from kvslim.integrations.transformers.saving import KIND

    if load is not None:
        Contents(load, KIND, verify=False)
    if save is not None:
        check_target(save)


def open_past(session: Session, path: Path | None, context: typer.Context) -> Past:
    """Return an empty cache, or the one in a file.

    Raises
    ------
    InputError
        The file is refused by `KVCache.load`, or is not one that the command line can go on from.
    """
    if path is None:
        return Past(session.new_cache())
    from kvslim.integrations.transformers import KVCache

    chosen = any(_is_given(context, name) for name in ("recipe", "key", "value"))
    cache = KVCache.load(path, session.loaded.model, recipe=session.recipe if chosen else None)
    assert cache.saved is not None
    ids, messages = cache.saved.ids, cache.saved.notes.get("messages")
    if ids is None or len(ids) != 1:
        raise InputError(
            f"{path} holds {'no token ids' if ids is None else f'{len(ids)} sequences'}; the command line goes on from "
            "one sequence with ids, as --save-cache or cache.save(path, ids=ids) write it"
        )
    if messages is not None and not _are_messages(messages):
        raise InputError(f"{path}: notes, messages are no list of roles and contents; save the cache again")
    facts = {"file": str(path), "tokens": cache.get_seq_length()}
    return Past(cache, ids[0].tolist(), messages, facts)


def save_past(past: Past, path: Path | None) -> dict[str, Any] | None:
    """Write the cache with its tokens and messages; what was written, for programs."""
    if path is None:
        return None
    import torch

    notes = {} if past.messages is None else {"messages": past.messages}
    past.cache.save(path, ids=torch.tensor([past.ids], dtype=torch.int64), notes=notes)
    tokens, nbytes = past.cache.get_seq_length(), path.stat().st_size
    typer.echo(f"[saved {tokens:,} tokens, {nbytes / 1e6:,.2f} MB: {path}]", err=True)
    return {"file": str(path), "nbytes": nbytes, "tokens": tokens}


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content")) for each in value
    )
