"""Fixed tasks on made-up records: each prompt lists two dozen of them and asks for JSON that only they can fill."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RECORDS = 24  # 1,300 to 1,500 tokens
PER_KIND = 4  # prompts of each kind per table
Record = dict[str, Any]

_FIRST = ("Ada", "Bela", "Carla", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mira")
_LAST = ("Olsen", "Okafor", "Rossi", "Novak", "Tanaka", "Weber", "Silva", "Haddad", "Moreau", "Lindqvist", "Brandt")
_CITIES = ("Bergen", "Cadiz", "Dakar", "Exeter", "Graz", "Havana", "Izmir", "Kyoto", "Lagos", "Malmo", "Porto", "Quito")
_ITEMS = ("desk lamp", "steel kettle", "rain jacket", "oak shelf", "bike pump", "wool blanket", "clay teapot")
_HOTELS = ("Aurora", "Bellevue", "Castello", "Dorado", "Edelweiss", "Fjord", "Grand Plaza")
_PARTS = ("scheduler", "billing", "search index", "login page", "mail relay", "report export", "file store")
_LEVELS = ("low", "medium", "high", "critical")


@dataclass(frozen=True)
class Table:
    """A kind of record, and the tool that acts on one.

    Attributes
    ----------
    noun, prefix : str
        What a record is called, and how its number begins.
    person : str
        The field that holds a name; no two records of a prompt share it.
    draw : callable
        Makes the fields after the number and the name.
    tool, summary : str
    arguments : tuple of str
        Fields that the tool takes, the number first.
    """

    noun: str
    prefix: str
    person: str
    draw: Callable[[random.Random], Record]
    tool: str
    summary: str
    arguments: tuple[str, ...]


TABLES = (
    Table(
        noun="order",
        prefix="A",
        person="customer",
        draw=lambda rng: {
            "city": rng.choice(_CITIES),
            "item": rng.choice(_ITEMS),
            "quantity": rng.randint(1, 60),
            "ship_date": _date(rng),
        },
        tool="schedule_delivery",
        summary="Deliver an order to its city on its shipping date.",
        arguments=("order", "city", "ship_date"),
    ),
    Table(
        noun="booking",
        prefix="B",
        person="guest",
        draw=lambda rng: {
            "hotel": rng.choice(_HOTELS),
            "room": rng.randint(100, 999),
            "nights": rng.randint(1, 21),
            "arrival": _date(rng),
        },
        tool="confirm_booking",
        summary="Confirm a booking of a room from its arrival date.",
        arguments=("booking", "room", "arrival"),
    ),
    Table(
        noun="ticket",
        prefix="T",
        person="reporter",
        draw=lambda rng: {
            "component": rng.choice(_PARTS),
            "severity": rng.choice(_LEVELS),
            "votes": rng.randint(1, 400),
            "opened": _date(rng),
        },
        tool="assign_ticket",
        summary="Assign a ticket to the team of its component, with its severity.",
        arguments=("ticket", "component", "severity"),
    ),
)


@dataclass(frozen=True)
class Exercise:
    """Records, a question after them, and the only JSON value that answers it."""

    name: str
    records: str
    question: str
    expected: Any

    @property
    def prompt(self) -> str:
        """Records and question."""
        return self.records + self.question


def exercises() -> list[Exercise]:
    """All prompts, the same ones every time."""
    return [_exercise(kind, table, number) for number in range(PER_KIND) for table in TABLES for kind in _QUESTIONS]


def _exercise(kind: str, table: Table, number: int) -> Exercise:
    name = f"{kind}-{table.noun}-{number}"
    rng = random.Random(name)
    records = _records(table, rng)
    question, expected = _QUESTIONS[kind](table, records, rng)
    lines = "\n".join(json.dumps(record) for record in records)
    opening = f"These are the {table.noun}s, one a line:\n\n{lines}\n\n"
    return Exercise(name, opening, f"{question} Answer with JSON alone, nothing else.", expected)


def _records(table: Table, rng: random.Random) -> list[Record]:
    people = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], RECORDS)
    numbers = rng.sample(range(1000, 10_000), RECORDS)
    return [
        {table.noun: f"{table.prefix}-{number}", table.person: person, **table.draw(rng)}
        for number, person in zip(numbers, people, strict=True)
    ]


def _extract(table: Table, records: list[Record], rng: random.Random) -> tuple[str, Any]:
    record = rng.choice(records)
    keys = ", ".join(record)
    return f"Give {table.noun} {record[table.noun]} as one JSON object with the keys {keys}.", record


def _find(table: Table, records: list[Record], rng: random.Random) -> tuple[str, Any]:
    record = rng.choice(records)
    wanted = [table.noun, *list(record)[2:4]]
    question = (
        f"Find the {table.noun} whose {table.person} is {record[table.person]}, and give it as one JSON object with "
        f"the keys {', '.join(wanted)}."
    )
    return question, {key: record[key] for key in wanted}


def _call(table: Table, records: list[Record], rng: random.Random) -> tuple[str, Any]:
    record = rng.choice(records)
    tools = "\n".join(f"{each.tool}({', '.join(each.arguments)}): {each.summary}" for each in TABLES)
    question = (
        f"These are the tools you can call:\n\n{tools}\n\nCall the right tool for {table.noun} {record[table.noun]}, "
        "with the arguments its line gives. Write the call as one JSON object with the keys name and arguments; "
        "arguments is an object with the tool's argument names as keys."
    )
    return question, {"name": table.tool, "arguments": {key: record[key] for key in table.arguments}}


def _pair(table: Table, records: list[Record], rng: random.Random) -> tuple[str, Any]:
    pair = rng.sample(records, 2)
    wanted = [table.noun, list(pair[0])[-1]]
    question = (
        f"Give the {table.noun}s {pair[0][table.noun]} and {pair[1][table.noun]}, in this order, as a JSON array of "
        f"two objects with the keys {' and '.join(wanted)}."
    )
    return question, [{key: record[key] for key in wanted} for record in pair]


_QUESTIONS: dict[str, Callable[[Table, list[Record], random.Random], tuple[str, Any]]] = {
    "extract": _extract,
    "find": _find,
    "call": _call,
    "pair": _pair,
}


def _date(rng: random.Random) -> str:
    return f"2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
