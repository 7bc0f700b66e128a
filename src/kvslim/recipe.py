"""Recipe: how a cache is packed, as a frozen value that parses from and prints to a short string.

Grammar (nothing here needs quoting in a shell)::

    recipe  = preset | k8v4-like pair | "k=" side "+" "v=" side        then any number of "+" option
    side    = { transform "/" } codec                                   e.g. rotate/lloyd:4
    step    = name { ":" argument }                                     e.g. affine:4:asym:scale=channel
    option  = block=128 | sinks=4 | recent=32 | immediate | exact=auto | layer.0-3=PRESET | layer.5.k=SIDE
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from kvslim.errors import RecipeError, did_you_mean
from kvslim.presets import PRESETS, Preset, pair

VERSION = 1
_STEP = re.compile(r"[a-z][a-z0-9_]*(:[a-z0-9_.=-]+)*")
_LAYER = re.compile(r"layer\.([0-9]{1,6})(?:-([0-9]{1,6}))?(?:\.([kv]))?")
_NUMBER = re.compile(r"[0-9]{1,9}")
_NUMBERS = {"block": (8, 4096), "sinks": (0, 4096), "recent": (0, 1 << 20)}
_FIELDS = {"k": "key", "v": "value"}
_EXACT = ("auto", "fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Step:
    """One transform or codec by name, with its arguments as text."""

    name: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ":".join((self.name, *self.args))


@dataclass(frozen=True)
class Side:
    """How K or V is packed: transforms in order, then one codec."""

    transforms: tuple[Step, ...]
    codec: Step

    @classmethod
    def parse(cls, text: str) -> Side:
        """Read ``transform/.../codec``; names are checked when the side is built."""
        steps = []
        for part in text.split("/"):
            if not _STEP.fullmatch(part):
                raise RecipeError(
                    f"cannot read '{part}' in side '{text}'; write name:argument, for example affine:4:asym"
                )
            name, *args = part.split(":")
            steps.append(Step(name, tuple(args)))
        return cls(tuple(steps[:-1]), steps[-1])

    def __str__(self) -> str:
        return "/".join(str(step) for step in (*self.transforms, self.codec))


@dataclass(frozen=True)
class LayerOverride:
    """Another side for the layers `first` to `last` (inclusive); `letter` is ``k`` or ``v``."""

    first: int
    last: int
    letter: str
    side: Side

    def __str__(self) -> str:
        span = f"{self.first}-{self.last}" if self.last != self.first else f"{self.first}"
        return f"layer.{span}.{self.letter}={self.side}"


@dataclass(frozen=True)
class Recipe:
    """How a KV cache is packed.

    Attributes
    ----------
    key, value : Side
        Transforms and codec of each side.
    block : int
        Tokens per sealed block.
    sinks : int
        First tokens of a sequence that stay exact.
    recent : int
        Latest tokens that stay exact at least; the tail holds ``recent`` to ``recent + block - 1`` tokens.
    immediate : bool
        Pack every token right after its own attention, with no tail. Needs codecs without block statistics.
    exact : str
        Dtype of exact tokens: ``auto`` is the model's own, but fp16 where an fp32 model meets a packed side.
    layers : tuple of LayerOverride
        Later entries win.
    label : str
        What the user wrote; shown in tables, not compared.
    """

    key: Side
    value: Side
    block: int = 128
    sinks: int = 4
    recent: int = 32
    immediate: bool = False
    exact: str = "auto"
    layers: tuple[LayerOverride, ...] = ()
    label: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """Read a preset name, a pair such as ``k8v4``, or a full recipe string.

        Raises
        ------
        RecipeError
            Naming the part that is not understood and what is allowed.
        """
        if isinstance(text, Recipe):
            return text
        if not isinstance(text, str) or not text.strip():
            raise RecipeError(f"a recipe is a non-empty string, got {text!r}; see `kvslim recipes`")
        head, *options = text.strip().split("+")
        if not head.startswith(("k=", "v=")):
            base = _expand(head)
            recipe = replace(cls.parse(base), label=text)
        else:
            options = [head, *options]
            given = [option.split("=", 1) for option in options if option.startswith(("k=", "v="))]
            sides = dict(given)
            if len(given) != 2 or len(sides) != 2:
                raise RecipeError(f"'{text}' must give each side once; write k=SIDE+v=SIDE")
            recipe = cls(Side.parse(sides["k"]), Side.parse(sides["v"]), label=text)
            options = [option for option in options if not option.startswith(("k=", "v="))]
        for option in options:
            recipe = recipe._with(option)
        recipe._check()
        return recipe

    def _with(self, option: str) -> Recipe:
        name, has_value, text = option.partition("=")
        layer = _LAYER.fullmatch(name)
        if name == "immediate" and not has_value:
            return replace(self, immediate=True, recent=0)
        if name in _NUMBERS and _NUMBER.fullmatch(text):
            low, high = _NUMBERS[name]
            if not low <= int(text) <= high:
                raise RecipeError(f"{name}={text} is out of range; use {low} to {high}")
            return replace(self, **_changed(name, int(text)))
        if name == "exact" and text in _EXACT:
            return replace(self, exact=text)
        if name in ("k", "v") and has_value:
            return replace(self, **_changed(_FIELDS[name], Side.parse(text)))
        if layer and has_value:
            first, last = int(layer[1]), int(layer[2] or layer[1])
            if last < first:
                raise RecipeError(f"'{name}' ends before it starts; write layer.{last}-{first}")
            letters = layer[3] or "kv"
            overrides = (LayerOverride(first, last, letter, _side_of(text, letter)) for letter in letters)
            return replace(self, layers=(*self.layers, *overrides))
        known = ("block", "sinks", "recent", "immediate", "exact", "layer.N", "k", "v")
        raise RecipeError(
            f"cannot read option '{option}'; options are block=N, sinks=N, recent=N, immediate, "
            f"exact={'|'.join(_EXACT)}, layer.A-B=PRESET, layer.A.k=SIDE.{did_you_mean(name, known)}"
        )

    def _check(self) -> None:
        if self.block % 8:
            raise RecipeError(f"block={self.block} is no multiple of 8; use 8, 16, 32, 64, 128 or 256")
        if self.immediate and self.recent:
            raise RecipeError(
                f"immediate packs every token at once, so recent={self.recent} cannot hold; drop one of them"
            )

    @property
    def preset(self) -> Preset | None:
        """The preset that this recipe was named after, if any."""
        return PRESETS.get(self.label.split("+")[0])

    def with_sides(self, *, key: str | None = None, value: str | None = None) -> Recipe:
        """Return this recipe with K or V packed as in another preset, pair or side string."""
        recipe = self
        for letter, text in (("k", key), ("v", value)):
            if text:
                other = _side_of(text, letter)
                recipe = replace(recipe, **_changed(_FIELDS[letter], other))
                recipe = replace(recipe, label=f"{recipe.label}+{letter}={text}")
        return recipe

    def sides(self, layer: int) -> tuple[Side, Side]:
        """Key side and value side of one layer, overrides applied."""
        sides = {"k": self.key, "v": self.value}
        for override in self.layers:
            if override.first <= layer <= override.last:
                sides[override.letter] = override.side
        return sides["k"], sides["v"]

    def __str__(self) -> str:
        parts = [f"k={self.key}", f"v={self.value}", f"block={self.block}", f"sinks={self.sinks}"]
        parts.append("immediate" if self.immediate else f"recent={self.recent}")
        if self.exact != "auto":
            parts.append(f"exact={self.exact}")
        return "+".join([*parts, *(str(override) for override in self.layers)])

    def to_json(self) -> str:
        """Version, canonical text and label as a JSON object."""
        return json.dumps({"version": VERSION, "recipe": str(self), "label": self.label})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Invert `to_json`; a newer version is refused."""
        try:
            data: dict[str, Any] = json.loads(text)
            version, body = data["version"], data["recipe"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecipeError(f"not a recipe in JSON: {text[:80]!r}; expected keys 'version' and 'recipe'") from error
        if version != VERSION:
            raise RecipeError(
                f"recipe version {version} is not readable here (this kvslim reads {VERSION}); update kvslim"
            )
        return replace(cls.parse(body), label=data.get("label") or body)


def _expand(name: str) -> str:
    """Preset or pair name -> full recipe string."""
    if name in PRESETS:
        return PRESETS[name].recipe
    text = pair(name)
    if text is None:
        raise RecipeError(
            f"unknown recipe '{name}'; presets: {', '.join(PRESETS)}; or a pair such as k8v4, "
            f"or k=SIDE+v=SIDE (see `kvslim recipes`).{did_you_mean(name, PRESETS)}"
        )
    return text


def _changed(field_name: str, value: object) -> dict[str, Any]:
    return {field_name: value}


def _side_of(text: str, letter: str) -> Side:
    if text in PRESETS or pair(text) is not None:
        other = Recipe.parse(text)
        return other.key if letter == "k" else other.value
    if text.isdigit() and pair(f"k{text}v{text}") is not None:
        return _side_of(f"k{text}v{text}", letter)
    return Side.parse(text)
