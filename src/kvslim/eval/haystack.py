"""Long prompts with a fact hidden in them: passages of a text, facts between its sentences, a question at the end."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from kvslim.errors import InputError
from kvslim.eval.text import Text

_COLOURS = ("amber", "blue", "crimson", "golden", "green", "silver", "violet", "white")
_THINGS = ("anchor", "compass", "falcon", "harbour", "lantern", "orchard", "tower", "violin")
KEYS = tuple(f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS)
_OPENING = "Access codes are hidden in the text below. Remember them; you will be asked for one.\n\n"
_QUESTION = "What is the access code of the {key}? Answer with the code alone."
_ANSWER = "The access code of the {key} is"
# to the end of a sentence or paragraph; where none comes for long, to some space
_PIECE = re.compile(r"\S.{0,400}?(?:[.!?]\s+|\n\s*\n|\Z)|\S.{0,400}\s", re.DOTALL)


@dataclass(frozen=True)
class Facts:
    """Keys with their codes, and where each stands: 0 is before the text, 1 after it. The first one is asked for."""

    keys: tuple[str, ...]
    codes: tuple[str, ...]
    depths: tuple[float, ...]

    @classmethod
    def draw(cls, count: int, depth: float, rng: random.Random) -> Facts:
        """Draw `count` facts: the first at `depth`, the others spread evenly over the text."""
        keys = rng.sample(KEYS, count)
        codes = [str(code) for code in rng.sample(range(10_000, 100_000), count)]
        others = [(index + 0.5) / (count - 1) for index in range(count - 1)]
        return cls(tuple(keys), tuple(codes), (depth, *others))

    def sentence(self, index: int) -> str:
        """One fact as it stands in the text."""
        return f"The access code of the {self.keys[index]} is {self.codes[index]}. "


class Haystack:
    """A text cut into sentences, whose tokens are counted once.

    Parameters
    ----------
    tokenizer
        A chat template is used where it has one.
    text : Text
    """

    def __init__(self, tokenizer: Any, text: Text):
        self.tokenizer, self.text = tokenizer, text
        self.pieces = _PIECE.findall(text.content)
        encoded = tokenizer(self.pieces, add_special_tokens=False, verbose=False)["input_ids"] if self.pieces else []
        self._sums = [0, *accumulate(len(ids) for ids in encoded)]

    @property
    def tokens(self) -> int:
        """Tokens of the whole text."""
        return self._sums[-1]

    def prompt(self, facts: Facts, tokens: int, rng: random.Random) -> torch.Tensor:
        """Hide the facts in a passage drawn from the text; returns token ids, at most `tokens` of them.

        The prompt ends with the first words of the answer, so that models without a chat template answer as well.

        Raises
        ------
        InputError
            The text is too short, or `tokens` leave no room for a passage.
        """
        room = tokens - len(self._encode(self._hide([], facts), facts))
        if room < 1:
            raise InputError(
                f"{tokens} tokens do not hold {len(facts.keys)} facts and a question; use longer --lengths"
            )
        if room > self.tokens:
            raise InputError(
                f"the text {self.text.name} has {self.tokens:,} tokens, a prompt of {tokens:,} needs {room:,}; give a "
                "longer --text, or shorter --lengths"
            )
        first = rng.randrange(bisect_left(self._sums, self.tokens - room + 1))
        last = bisect_left(self._sums, self._sums[first] + room + 1) - 1
        while True:  # joined sentences may take some tokens more than each alone
            ids = self._encode(self._hide(self.pieces[first:last], facts), facts)
            if len(ids) <= tokens:
                return torch.tensor(ids, dtype=torch.long)
            last -= 1

    def question_tokens(self, keys: Iterable[str]) -> int:
        """Tokens that the longest question about these keys takes at the end of a prompt."""
        return max(question_tokens(self.tokenizer, _QUESTION.format(key=key), _ANSWER.format(key=key)) for key in keys)

    def _hide(self, pieces: Sequence[str], facts: Facts) -> str:
        sizes = [0, *accumulate(len(piece) for piece in pieces)]
        found: list[list[str]] = [[] for _ in sizes]
        for index, depth in enumerate(facts.depths):
            found[bisect_left(sizes, round(depth * sizes[-1]))].append(facts.sentence(index))
        return "".join("".join([*facts_here, piece]) for facts_here, piece in zip(found, [*pieces, ""], strict=True))

    def _encode(self, passage: str, facts: Facts) -> list[int]:
        content = f"{_OPENING}{passage.strip()}\n\n{_QUESTION.format(key=facts.keys[0])}"
        return encode_question(self.tokenizer, content, _ANSWER.format(key=facts.keys[0]))


def encode_question(tokenizer: Any, content: str, answer: str = "") -> list[int]:
    """Token ids of a question up to the first words of its answer, in the chat template where there is one."""
    if tokenizer.chat_template is None:
        return tokenizer(f"{content}\n\n{answer}", verbose=False)["input_ids"]
    return tokenizer(_in_template(tokenizer, content) + answer, add_special_tokens=False, verbose=False)["input_ids"]


def question_tokens(tokenizer: Any, question: str, answer: str = "") -> int:
    """Tokens from where `question` begins to the end of a prompt made by `encode_question`."""
    if tokenizer.chat_template is None:
        tail = f"{question}\n\n{answer}"
    else:
        text = _in_template(tokenizer, f"before it {question}") + answer
        tail = text[text.index(question) :]
    return len(tokenizer(tail, add_special_tokens=False)["input_ids"])


def _in_template(tokenizer: Any, content: str) -> str:
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
