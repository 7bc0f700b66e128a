"""`kvslim chat`: a conversation whose packed cache stays between turns, so that only new tokens are fed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options
from kvslim.cli.cache_file import Past, check_files, open_past, save_past
from kvslim.cli.generate import summary, write
from kvslim.errors import InputError, KVSlimError, did_you_mean

if TYPE_CHECKING:
    from kvslim.cli.session import Reply, Session
    from kvslim.integrations.transformers import KVCache

_COMMANDS = ("/reset", "/stats", "/exit")


def chat(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    recipe: options.Recipe = options.RECIPE,
    key: options.Key = None,
    value: options.Value = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 512,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    load_cache: options.LoadCache = None,
    save_cache: options.SaveCache = None,
) -> None:
    """Talk to a model; each line is a turn. Commands: /reset, /stats, /exit.

    --save-cache is written at the end; --load-cache goes on with the conversation in such a file.
    """
    from kvslim.cli.session import Session

    check_files(load_cache, save_cache)
    session = Session.open(
        model, recipe, key=key, value=value, weights=weights, dtype=dtype, device=device, models_dir=models_dir
    )
    if not session.has_chat_template:
        raise InputError(f"{session.loaded.name} has no chat template; use `kvslim generate --raw`, or another model")
    past = open_past(session, load_cache, context)
    if past.messages is None:
        raise InputError(f"{load_cache} holds plain text; go on with it by `kvslim generate --raw`")
    if system is not None and past.messages:
        raise InputError(f"--system: the conversation in {load_cache} has begun already; leave it out")
    first = [] if system is None else [{"role": "system", "content": system}]
    talk = Conversation(session, past.cache, first, max_new_tokens, temperature, seed, past.messages, past.ids)
    interactive = sys.stdin.isatty()
    while (line := _next_line(interactive)) is not None and line != "/exit":
        try:
            _answer(talk, line)
        except KVSlimError as error:
            if not interactive:
                raise
            typer.secho(f"kvslim: {error}", fg="red", err=True)  # one bad turn must not end the conversation
    save_past(Past(talk.cache, talk.held, [*talk.first, *talk.turns]), save_cache)


@dataclass
class Conversation:
    """Messages so far, and the packed cache with the token ids it holds."""

    session: Session
    cache: KVCache
    first: list[dict[str, str]]
    max_new_tokens: int
    temperature: float
    seed: int | None
    turns: list[dict[str, str]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def say(self, text: str) -> Reply:
        """Answer one message; nothing is remembered if that fails."""
        from kvslim.cli.session import keep_prefix

        asked = [*self.turns, {"role": "user", "content": text}]
        ids = self.session.encode_messages([*self.first, *asked])
        self.session.check_room(len(ids), 1)
        room = self.max_new_tokens if self.session.context is None else self.session.context - len(ids)
        keep_prefix(self.cache, self.held, ids)
        self.held = ids[: self.cache.get_seq_length()]
        reply = self.session.reply(
            ids,
            self.cache,
            max_new_tokens=min(self.max_new_tokens, room),
            temperature=self.temperature,
            seed=self.seed,
            on_text=write,
        )
        self.held = [*ids, *reply.ids][: self.cache.get_seq_length()]  # the last new token was never fed
        self.turns = [*asked, {"role": "assistant", "content": reply.text}]
        return reply

    def reset(self) -> None:
        """Forget all turns."""
        self.cache.reset()
        self.turns, self.held = [], []


def _next_line(interactive: bool) -> str | None:
    """The next line that is not blank, or None at the end of input."""
    while True:
        if interactive:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.strip()


def _answer(talk: Conversation, line: str) -> None:
    if line == "/reset":
        talk.reset()
        typer.echo("[forgotten]", err=True)
    elif line == "/stats":
        typer.echo(str(talk.cache.report()), err=True)
    elif line.startswith("/"):
        raise InputError(f"unknown command '{line}'; there are {', '.join(_COMMANDS)}.{did_you_mean(line, _COMMANDS)}")
    else:
        reply = talk.say(line)
        typer.echo()
        typer.echo(
            f"{summary(reply, talk.cache)[:-1]}; {reply.fed_tokens:,} of the prompt's tokens were new]", err=True
        )
