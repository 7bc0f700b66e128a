"""Variant: one compilation of one kernel, with all that a compiler without a GPU needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)  # that kernels are compiled for ahead


@dataclass(frozen=True)
class Variant:
    """One compilation of one kernel, for ``triton.compile(ASTSource(fn, signature, ...), options=...)``.

    Attributes
    ----------
    kernel : str
        ``attend``, ``append`` ...
    head_dim : int
    layout : str
        Which packed bytes it reads or writes, in a word for people: ``slim4``, ``none``.
    fn : JITFunction
    signature : dict of str to str
        Triton type of every argument by name (``*fp16``, ``i32``); ``constexpr`` for those in `constexprs`. Pointers
        are aligned to 16 bytes.
    constexprs : dict of str to object
    options : dict of str to int
        Of triton's compiler: ``num_warps``, ``num_stages`` ...
    loop_elements : int
        KV elements that one pass of the main loop reads or writes, all threads of a program together; 0 if it has none.
    multiples : tuple of str
        Integers that are multiples of 16 in real calls, for which triton compiles vector loads.
    """

    kernel: str
    head_dim: int
    layout: str
    fn: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    options: dict[str, int]
    loop_elements: int = 0
    multiples: tuple[str, ...] = ()
