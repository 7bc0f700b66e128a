"""Which of the append kernel's forms encodes a side: its compile-time settings, and why a side has none."""

from __future__ import annotations

from dataclasses import dataclass

from kvslim.bitpack import unit_of
from kvslim.codecs.affine import AffineCodec
from kvslim.codecs.base import group_of
from kvslim.codecs.float8 import Float8Codec
from kvslim.codecs.microfloat import MicrofloatCodec
from kvslim.codecs.side import Frozen, SidePacker
from kvslim.codecs.table import TableCodec
from kvslim.transforms.balance import Balanced
from kvslim.transforms.base import Fitted
from kvslim.transforms.center import Mean, PageMean
from kvslim.transforms.rotate import Rotation

_WIDEST = 512  # channels of which a tile's values still fit into registers


class NoAppendFormError(Exception):
    """A transform or codec that the append kernel does not know; the text names it."""


@dataclass(frozen=True)
class AppendForm:
    """Compile-time settings of the kernel, by their names there in small letters.

    Attributes
    ----------
    steps : tuple of str
        Transform steps: ``weight``, ``mean``, ``page``, ``hadamard``, ``matrix``.
    codec : str
        ``table``, ``affine``, ``e2m1`` or ``e4m3``.
    bits : int
    over : str
        What shares a scale: ``group`` (of a token's channels, or all of them), ``block``, ``channel``; of e2m1 what its
        outer scale belongs to, ``group`` if it has none.
    fit : str
        Of table: how the scale follows from the codes, see codecs.scales.
    kind : str
        Of affine ``sym`` or ``asym``; of table what values are divided by first, ``rms`` or ``range``; of e2m1
        ``e8m0``, ``e4m3`` or ``fourorsix``.
    d, width, unit : int
        head_dim, channels per scale, channels of a packing unit.
    feedback : bool
        Carry rounding errors.
    mean : int
        Tokens of the block whose mean is stored; 0 where none is.
    """

    steps: tuple[str, ...]
    codec: str
    bits: int
    over: str
    fit: str
    kind: str
    d: int
    width: int
    unit: int
    feedback: bool = False
    mean: int = 0


def append_form(packer: SidePacker, frozen: Frozen) -> AppendForm:
    """Return the form that encodes a frozen side.

    Raises
    ------
    NoAppendFormError
        There is none; the text says what it lacks.
    """
    head_dim = packer.layout.head_dim
    if head_dim % 8 or head_dim > _WIDEST:
        raise NoAppendFormError(f"head_dim={head_dim} (multiples of 8 up to {_WIDEST})")
    steps = tuple(kind for fitted in frozen.chain.steps for kind in _steps(fitted))
    if "matrix" in steps[1:]:
        raise NoAppendFormError("a random orthogonal rotation after another transform")
    form = _form(packer, head_dim, steps, frozen.moment is not None)
    if form.width != head_dim and form.width & (form.width - 1):
        raise NoAppendFormError(f"groups of {form.width} channels (powers of two)")
    return form


def _steps(fitted: Fitted) -> tuple[str, ...]:
    if type(fitted) is Balanced:  # what is derived from one may transform in its own way
        return ("weight",)
    if type(fitted) is Mean:
        return ("mean",)
    if type(fitted) is PageMean:
        return ("page",)
    if type(fitted) is Rotation and fitted.settings.kind == "orthogonal":
        return ("matrix",)
    if type(fitted) is Rotation and not fitted.settings.parts:
        return ("weight", "hadamard") if fitted.settings.signs else ("hadamard",)
    raise NoAppendFormError(f"transform {type(fitted).__name__}" + (" by parts" * (type(fitted) is Rotation)))


def _form(packer: SidePacker, d: int, steps: tuple[str, ...], has_metric: bool) -> AppendForm:
    codec, unit = packer.codec, unit_of(d)
    if type(codec) is TableCodec and not codec.std:
        kind, width = "range" if codec.kind == "nf" else "rms", group_of(codec.scale, d)
        feedback, mean = codec.feedback and has_metric, packer.layout.block if codec.mean else 0
        return AppendForm(steps, "table", codec.bits, "group", codec.fit, kind, d, width, unit, feedback, mean)
    if type(codec) is AffineCodec and not codec.feedback:
        over = codec.scale if codec.scale in ("block", "channel") else "group"
        kind = "asym" if codec.asym else "sym"
        return AppendForm(steps, "affine", codec.bits, over, "plain", kind, d, group_of(codec.scale, d), unit)
    if type(codec) is MicrofloatCodec:
        kind = "fourorsix" if codec.fourorsix else codec.scale
        over = "group" if codec.scale == "e8m0" else "block"
        return AppendForm(steps, "e2m1", 4, over, "plain", kind, d, codec.layout(d, 1).segments[0].group, unit)
    if type(codec) is Float8Codec and codec.kind == "e4m3":
        return AppendForm(steps, "e4m3", 8, "group", "plain", "sym", d, d, unit)
    name = type(codec).__name__.removesuffix("Codec").lower()
    lacking = [word for word in ("std", "feedback") if getattr(codec, word, False)]
    raise NoAppendFormError(f"codec {name}" + (f" with {' and '.join(lacking)}" if lacking else ""))
