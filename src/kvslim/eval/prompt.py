"""The demo's prompt: some pages of Python's language reference, and a question that only they answer word by word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvslim.errors import InputError
from kvslim.eval.text import python_topics

QUESTION = "According to the text above, which steps does a with statement with one item take? List them in order."
# The answer is in the first topic, so that most of the prompt lies between it and the question.
_TOPICS = ("with", "raise", "context-managers", "assert", "del", "global", "lambda", "try", "execmodel", "import")
_OPENING = "Here is a part of the Python language reference.\n\n"


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    Attributes
    ----------
    ids : Tensor of shape (tokens,)
        In the chat template, up to where the answer starts.
    sequel : Tensor of shape (tokens,)
        The pages that come after those in the prompt: text to score beyond the answer.
    """

    ids: torch.Tensor
    sequel: torch.Tensor


def build_prompt(tokenizer: Any, *, tokens: int, sequel: int) -> Prompt:
    """Take whole paragraphs until they have at least so many tokens, and ask `QUESTION` about them.

    Parameters
    ----------
    tokenizer
        A chat template is used where it has one.
    tokens, sequel : int
        Least number of tokens of the pages, and number of tokens to keep after them.

    Raises
    ------
    InputError
        This Python has no documentation topics, or the pages are too short.
    """
    topics = python_topics()
    pages = "\n\n".join(topics[name].strip() for name in _TOPICS if name in topics)
    paragraphs = pages.split("\n\n")
    lengths = [len(_encode(tokenizer, f"{paragraph}\n\n")) for paragraph in paragraphs]
    end = _count_until(lengths, tokens)
    after = _encode(tokenizer, "\n\n".join(paragraphs[end:]))
    if end == len(paragraphs) or len(after) < sequel:
        raise InputError(
            f"Python's documentation topics have {sum(lengths):,} tokens, the demo needs {tokens + sequel:,}"
        )
    text = "\n\n".join(paragraphs[:end])
    return Prompt(_ask(tokenizer, text), torch.tensor(after[:sequel]))


def _count_until(lengths: list[int], least: int) -> int:
    """How many entries it takes to sum up to `least`."""
    total = 0
    for index, length in enumerate(lengths):
        total += length
        if total >= least:
            return index + 1
    return len(lengths)


def _ask(tokenizer: Any, text: str) -> torch.Tensor:
    content = f"{_OPENING}{text}\n\n{QUESTION}"
    if tokenizer.chat_template is None:
        return torch.tensor(tokenizer(f"{content}\n\nAnswer:")["input_ids"])
    messages = [{"role": "user", "content": content}]
    return torch.tensor(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
