"""`kvslim generate`: answer one prompt with a packed cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options
from kvslim.cli.cache_file import Past, check_files, open_past, save_past
from kvslim.errors import InputError

if TYPE_CHECKING:
    from kvslim.cli.session import Reply, Session
    from kvslim.integrations.transformers import KVCache


def generate(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    recipe: options.Recipe = options.RECIPE,
    key: options.Key = None,
    value: options.Value = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Stop after so many.")] = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the prompt as it is, without the chat template.")] = False,
    load_cache: options.LoadCache = None,
    save_cache: options.SaveCache = None,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Answer one prompt with a packed cache.

    The prompt comes from --prompt, --file or standard input. Text goes to standard output as it is made; speed and what
    the cache holds go to standard error. With --load-cache the prompt goes on after what that cache holds: as the
    next message of a conversation, or as it is after plain text.
    """
    text = read_prompt(prompt, file)
    from kvslim.cli.session import Session, keep_prefix

    check_files(load_cache, save_cache)
    session = Session.open(
        model, recipe, key=key, value=value, weights=weights, dtype=dtype, device=device, models_dir=models_dir
    )
    past = open_past(session, load_cache, context)
    ids = _prompt_ids(session, past, text, raw=raw)
    session.check_room(len(ids), max_new_tokens)
    keep_prefix(past.cache, past.ids, ids)
    reply = session.reply(
        ids,
        past.cache,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        on_text=_discard if as_json else write,
    )
    if not as_json:
        typer.echo()
        typer.echo(summary(reply, past.cache), err=True)
    past.ids = [*ids, *reply.ids]
    if past.messages is not None:
        past.messages.append({"role": "assistant", "content": reply.text})
    saved = save_past(past, save_cache)
    if as_json:
        files = {"loaded_cache": past.facts, "saved_cache": saved}
        typer.echo(json.dumps(as_dict(session, reply, past.cache) | files, ensure_ascii=False))


def _prompt_ids(session: Session, past: Past, text: str, *, raw: bool) -> list[int]:
    """Tokens of the past and the prompt; `past.messages` becomes what they say, None where it is plain text."""
    if not raw and session.has_chat_template and past.messages is not None:
        past.messages.append({"role": "user", "content": text})
        return session.encode_messages(past.messages)
    if not raw:
        why = f"{past.facts['file']} holds plain text" if past.facts else f"{session.loaded.name} has no chat template"
        typer.echo(f"{why}: the prompt goes in as it is", err=True)
    past.messages = None
    return [*past.ids, *session.encode(text, more=bool(past.ids))]


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Text of the prompt from one of its three sources.

    Raises
    ------
    InputError
        If there is none, more than one, or it is empty or unreadable.
    """
    if prompt is not None and file is not None:
        raise InputError("--prompt and --file are both given; give one")
    if prompt is None and file is None and sys.stdin.isatty():
        raise InputError("no prompt; give --prompt TEXT or --file PATH, or pipe text in")
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8")
        else:
            text = sys.stdin.read() if prompt is None else prompt
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompt from {file or 'standard input'}: {error}; give UTF-8 text") from error
    if not text.strip():
        raise InputError("the prompt is empty; give some text with --prompt TEXT, --file PATH or a pipe")
    return text


def write(text: str) -> None:
    """Write streamed text at once."""
    typer.echo(text, nl=False)


def _discard(text: str) -> None:
    pass


def summary(reply: Reply, cache: KVCache) -> str:
    """One line: tokens, speed, and what the cache holds."""
    report = cache.report()
    share = report.nbytes / report.nbytes_16bit if report.nbytes_16bit else 0.0
    speed = f"prefill {reply.prefill_tokens_per_s:,.0f} tokens/s, decode {reply.decode_tokens_per_s:,.1f} tokens/s"
    held = f"{report.bits_per_value:.2f} bits per value, {report.nbytes / 1e6:,.2f} MB held, {share:.0%} of 16 bits"
    layers = f"{report.layers_packed} of {report.layers_total} layers packed"
    return f"[{reply.prompt_tokens:,} + {len(reply.ids):,} tokens; {speed}; {report.label}: {held}; {layers}]"


def as_dict(session: Session, reply: Reply, cache: KVCache) -> dict[str, object]:
    """The same for programs, keys with their units."""
    return {
        "model": session.loaded.name,
        "recipe": str(cache.recipe),
        "text": reply.text,
        "prompt_tokens": reply.prompt_tokens,
        "new_tokens": len(reply.ids),
        "prefill_tokens_per_s": reply.prefill_tokens_per_s,
        "decode_tokens_per_s": reply.decode_tokens_per_s,
        "cache": cache.report().to_dict(),
    }
