"""SidePacker: one side of one layer, transforms and codec together; Frozen: its parameters once they are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch.nn.functional import pad

from kvslim.codecs import build_codec
from kvslim.codecs.base import Codec
from kvslim.codecs.decode import decode
from kvslim.codecs.feedback import metric_factor
from kvslim.codecs.none import NoneCodec
from kvslim.errors import StateFileError
from kvslim.layout import PackedBlock, PackedLayout
from kvslim.recipe import Side
from kvslim.transforms import build_transforms
from kvslim.transforms.base import Chain, Sample, Saved, Transform, fit_chain, map_moment

_PRIOR_TOKENS = 256  # prompt tokens that weigh as much as the prior
_TINY = 1e-30
_SAME_LEVELS = 1e-5  # relative; levels are found by iteration, and neighbouring levels differ by far more


@dataclass(frozen=True, eq=False)
class Frozen:
    """Parameters of one side, frozen at the first seal and shared by forks.

    Attributes
    ----------
    chain : Chain
    table : Tensor of shape (entries,), fp32, or None
    moment : Tensor of shape (kv_heads, head_dim * (head_dim + 1) / 2), fp16, or None
        Query moment in the transformed basis, for write-time feedback; its lower triangle, scaled to a mean diagonal
        of 1. A quarter of the bytes of U, which is worked out again at each seal.
    """

    chain: Chain
    table: torch.Tensor | None
    moment: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that this cache family owns, by name."""
        owned = dict(self.chain.tensors())
        if self.table is not None:
            owned["table"] = self.table
        if self.moment is not None:
            owned["moment"] = self.moment
        return owned

    def offset(self, starts: torch.Tensor, width: int) -> torch.Tensor | None:
        """Mean that the chain removed from blocks at `starts`, (blocks, kv_heads, width), or None.

        Stored channels beyond head_dim (a residual's signs) have none.
        """
        offset = self.chain.offset(starts)
        return None if offset is None else pad(offset, (0, width - offset.shape[-1]))

    def factor(self) -> torch.Tensor | None:
        """U of the query metric, (kv_heads, head_dim, head_dim), or None without feedback."""
        return None if self.moment is None else metric_factor(expand(self.moment))


class SidePacker:
    """How K or V of one layer is packed.

    Parameters
    ----------
    side : Side
    head_dim, block : int
    dtype : str
        The model's dtype name (``fp32`` ...); what ``none`` stores.
    """

    def __init__(self, side: Side, head_dim: int, block: int, dtype: str):
        codec: Codec = build_codec(side)
        if isinstance(codec, NoneCodec) and not side.codec.args:
            codec = replace(codec, dtype=dtype)
        self._join(build_transforms(side), codec, head_dim, block, dtype)

    @classmethod
    def of(cls, codec: Codec, head_dim: int, block: int, transforms: tuple[Transform, ...] = ()) -> SidePacker:
        """Join a codec and transforms that no recipe needs to know by name."""
        packer = cls.__new__(cls)
        packer._join(transforms, codec, head_dim, block, "fp32")
        return packer

    def _join(self, transforms: tuple[Transform, ...], codec: Codec, head_dim: int, block: int, dtype: str) -> None:
        self.transforms, self.codec, self.dtype = transforms, codec, dtype
        self.layout: PackedLayout = codec.layout(head_dim, block)
        self.needs_queries = codec.needs_queries or any(transform.needs_queries for transform in self.transforms)

    def freeze(self, sample: Sample) -> Frozen:
        """Fit the transforms on `sample`, and the query metric where the codec feeds rounding errors back."""
        chain = fit_chain(self.transforms, sample)
        moment = None
        if self.codec.needs_queries and sample.moment is not None:
            moment = compact(map_moment(chain, mixed_moment(sample)))
        return Frozen(chain, shared_table(self.codec, sample.x.device), moment)

    def restore(self, saved: Saved, device: torch.device) -> Frozen:
        """Take `Frozen.tensors` out of a file.

        Raises
        ------
        StateFileError
            They are not what this side stores, or were made with other code levels.
        """
        steps = []
        for at, transform in enumerate(self.transforms):
            own = frozenset(name.removeprefix(f"{at}.") for name in saved.names if name.startswith(f"{at}."))
            take = partial(_take_of_step, saved, at)
            steps.append(transform.restore(replace(saved, names=own, take=take, where=f"{saved.where}, step {at}")))
        table = shared_table(self.codec, device)
        if table is not None:
            table = _same_levels(saved, table)
        moment = None
        if self.codec.needs_queries and "moment" in saved.names:
            size = saved.head_dim * (saved.head_dim + 1) // 2
            moment = saved.take("moment", (saved.kv_heads, size), torch.float16)
        frozen = Frozen(Chain(tuple(steps)), table, moment)
        if frozen.tensors().keys() != saved.names:
            raise StateFileError(
                f"{saved.where} has {sorted(saved.names)}, expected {sorted(frozen.tensors())}; the file is damaged"
            )
        try:
            frozen.factor()
        except torch.linalg.LinAlgError as error:
            raise StateFileError(f"{saved.where}: moment is no query metric; the file is damaged") from error
        return frozen

    def encode(
        self,
        x: torch.Tensor,
        frozen: Frozen,
        starts: torch.Tensor | None = None,
        earlier: Sequence[tuple[PackedBlock, int]] = (),
    ) -> PackedBlock:
        """Encode tokens of shape (blocks, kv_heads, tokens, head_dim), fp32, as the model made them.

        `earlier` are the sequence's blocks before these with their valid tokens, for codecs that look back
        (`Codec.earlier_blocks`).
        """
        x = frozen.chain.forward(x, starts)
        if not self.codec.earlier_blocks:
            return PackedBlock(self.layout, self.codec.encode(x, frozen.factor()))
        return self._in_turn(x, frozen, [decode(block, frozen.table)[..., :valid, :] for block, valid in earlier])

    def _in_turn(self, x: torch.Tensor, frozen: Frozen, earlier: list[torch.Tensor]) -> PackedBlock:
        """Encode block after block, each with what those before it decode to."""
        done: list[dict[str, torch.Tensor]] = []
        for block in x.split(1):
            before = earlier[-self.codec.earlier_blocks :]
            parts = self.codec.encode_after(block, torch.cat(before, dim=-2) if before else block[..., :0, :])
            earlier.append(decode(PackedBlock(self.layout, parts), frozen.table))
            done.append(parts)
        return PackedBlock(self.layout, {name: torch.cat([parts[name] for parts in done]) for name in done[0]})


def _take_of_step(saved: Saved, at: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return saved.take(f"{at}.{name}", shape, dtype)


def _same_levels(saved: Saved, table: torch.Tensor) -> torch.Tensor:
    """Code levels as saved: the shared copy where they are its bits, those of the file where machines round apart."""
    own = saved.take("table", tuple(table.shape), torch.float32)
    if torch.equal(own, table):
        return table
    if not torch.allclose(own, table, rtol=_SAME_LEVELS, atol=0):
        raise StateFileError(f"{saved.where}: codes were made with other levels than this kvslim's; update kvslim")
    return own


@lru_cache(maxsize=64)
def shared_table(codec: Codec, device: torch.device) -> torch.Tensor | None:
    """TABLE of a codec, one copy a process and device: layers and sequences must not each hold their own."""
    table = codec.table()
    return None if table is None else table.to(device)


def prior_use(side: Side) -> str:
    """How much a calibration matters to `side`: ``unused``, ``helps`` or ``needed``."""
    uses = {transform.prior for transform in build_transforms(side)}
    if build_codec(side).needs_queries:
        uses.add("helps")
    return next((use for use in ("needed", "helps") if use in uses), "unused")


def mixed_moment(sample: Sample) -> torch.Tensor:
    """E[q q^T] of the prompt, mixed with the prior at the same mean diagonal by t = n / (n + 256)."""
    own = sample.moment
    assert own is not None
    if "query_moment" not in sample.prior:
        return own
    prior = sample.prior["query_moment"].to(own)
    t = sample.tokens / (sample.tokens + _PRIOR_TOKENS)
    return t * own + (1 - t) * prior * (_mean_diagonal(own) / _mean_diagonal(prior).clamp_min(_TINY))


def compact(moment: torch.Tensor) -> torch.Tensor:
    """Lower triangle of a symmetric (kv_heads, D, D) in fp16, scaled to a mean diagonal of 1."""
    rows, columns = torch.tril_indices(*moment.shape[-2:])
    return (moment / _mean_diagonal(moment).clamp_min(_TINY))[:, rows, columns].half()


def expand(triangle: torch.Tensor) -> torch.Tensor:
    """Invert `compact`, up to the scale."""
    size = (math.isqrt(8 * triangle.shape[-1] + 1) - 1) // 2
    rows, columns = torch.tril_indices(size, size)
    moment = torch.zeros(triangle.shape[0], size, size, device=triangle.device)
    moment[:, rows, columns] = triangle.float()
    moment[:, columns, rows] = triangle.float()
    return moment


def _mean_diagonal(moment: torch.Tensor) -> torch.Tensor:
    return moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
