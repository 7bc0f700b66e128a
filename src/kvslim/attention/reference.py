"""Reference attention: decode a bounded tile, then an fp32 softmax. It defines what correct means for every kernel.

Scores of packed tokens are taken in their own basis (``q' = q A^-T``) and their values summed there; the map is undone
once per query. Exact tokens are read as they are. All parts meet in one running softmax (merge by log-sum-exp), so
nothing of the history's length is ever made dense: at most `TILE` tokens are decoded at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvslim.codecs.decode import decode
from kvslim.store.layer import LayerStore, RowView

TILE = 1024  # tokens decoded at once
_QUERIES = 512  # query positions per pass, so that scores stay bounded in a long prefill


@dataclass(frozen=True)
class Score:
    """How raw scores become logits.

    Attributes
    ----------
    scaling : float
        Factor on q.k.
    softcap : float or None
        Logits become ``softcap * tanh(logits / softcap)`` before the mask (Gemma 2).
    sinks : Tensor of shape (heads,) or None
        One learned logit per head that joins the softmax without a value (gpt-oss).
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attend(
    query: torch.Tensor,
    store: LayerStore,
    chunk: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    score: Score,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Attention of a chunk over everything stored and itself.

    Parameters
    ----------
    query : Tensor of shape (batch, heads, chunk, head_dim)
    store : LayerStore
        Tokens before the chunk.
    chunk : (Tensor, Tensor)
        Keys and values of the chunk, (batch, kv_heads, chunk, head_dim); attended exactly.
    mask : Tensor of shape (batch, 1 or heads, chunk, stored columns + chunk), bool or additive float, or None
        None: nothing stored is hidden, and the chunk is causal if `causal`.
    score : Score

    Returns
    -------
    Tensor of shape (batch, heads, chunk, value_head_dim)
        In the dtype of `query`. Rows that see no token are zero.
    """
    batch, heads, _, _ = query.shape
    out = query.new_empty(batch, heads, query.shape[2], chunk[1].shape[-1])
    for row in range(batch):
        view = store.view(row)
        own = None if mask is None else mask[row]
        for start in range(0, query.shape[2], _QUERIES):
            stop = min(start + _QUERIES, query.shape[2])
            part = own[:, start:stop] if own is not None else None
            pass_ = _Pass(query[row, :, start:stop], store, view, part, score)
            pass_.packed()
            pass_.exact(view.key, view.value, pass_.stored_mask(_exact_tokens(view)))
            pass_.chunk(chunk[0][row], chunk[1][row], start, causal)
            out[row, :, start:stop] = pass_.result().to(query.dtype)
    return out


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    score: Score,
    *,
    causal: bool,
) -> torch.Tensor:
    """Attention over plain keys and values with softcap and attention sinks; shapes as in `attend`.

    The keys may be longer than the queries; without a mask, the queries are the last positions.
    """
    batch, heads, length, _ = query.shape
    kv_heads, tokens = key.shape[1:3]
    out = query.new_empty(batch, heads, length, value.shape[-1])
    for row in range(batch):
        running = Softmax(query[row].float(), kv_heads, value.shape[-1], score)
        for at in range(0, tokens, TILE):
            end = min(at + TILE, tokens)
            hidden = _visible(mask[row], at, end) if mask is not None else None
            if mask is None and causal and length > 1:
                hidden = causal_bias(length, at - (tokens - length), end - (tokens - length), query.device)
            running.add(key[row, :, at:end].float(), value[row, :, at:end].float(), hidden)
        out[row] = running.result().to(query.dtype)
    return out


class Softmax:
    """A running softmax over parts of the context, for one sequence.

    Rows are ``(kv_heads, group * positions)``: the query heads that share a kv head lie together.

    Parameters
    ----------
    query : Tensor of shape (heads, positions, head_dim), fp32
    kv_heads, value_dim : int
    score : Score
    """

    def __init__(self, query: torch.Tensor, kv_heads: int, value_dim: int, score: Score):
        self.heads, self.positions = query.shape[:2]
        self.group = self.heads // kv_heads
        self.score = score
        self.query = query.reshape(kv_heads, self.group * self.positions, query.shape[-1])
        shape = (kv_heads, self.group * self.positions, 1)
        self.top = query.new_full(shape, -torch.inf)
        self.total = query.new_zeros(shape)
        self.sum = query.new_zeros(*shape[:2], value_dim)
        if score.sinks is not None:
            logits = score.sinks.float().view(kv_heads, self.group, 1).expand(-1, -1, self.positions)
            self.top = logits.reshape(shape).clone()
            self.total = torch.ones_like(self.top)

    def add(self, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take in exact tokens: key (kv_heads, n, head_dim), value (kv_heads, n, value_dim), additive bias."""
        weights, fade = self.weigh(self.query @ key.transpose(-1, -2), bias)
        self.sum = self.sum * fade + weights @ value

    def weigh(self, scores: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn raw scores (kv_heads, rows, n) into weights under the new maximum; also what earlier sums fade by."""
        scores = scores * self.score.scaling
        if self.score.softcap is not None:
            scores = torch.tanh(scores / self.score.softcap) * self.score.softcap
        if bias is not None:
            scores = self._with_bias(scores, bias)
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        safe = torch.where(top == -torch.inf, 0.0, top)  # a row that has seen nothing yet stays at -inf
        weights, fade = torch.exp(scores - safe), torch.exp(self.top - safe)
        self.total = self.total * fade + weights.sum(-1, keepdim=True)
        self.top = top
        return weights, fade

    def _with_bias(self, scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Add a bias of shape (1 or heads, positions, n)."""
        kv_heads, _, n = scores.shape
        split = scores.view(kv_heads, self.group, self.positions, n)
        per_head = bias if bias.shape[0] == 1 else bias.view(kv_heads, self.group, self.positions, n)
        return (split + per_head).view_as(scores)

    def result(self, summed: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention output (heads, positions, value_dim)."""
        out = (self.sum if summed is None else summed) / torch.where(self.total == 0, 1.0, self.total)
        return out.view(self.heads, self.positions, -1)


class _Pass:
    """One pass over one sequence for some of its query positions."""

    def __init__(self, query: torch.Tensor, store: LayerStore, view: RowView, mask: torch.Tensor | None, score: Score):
        self.store, self.view, self.mask = store, view, mask
        self.running = Softmax(query.float(), store.kv_heads, store.head_dims[1], score)
        self.basis_sum: torch.Tensor | None = None  # values summed in the packed basis, before the map is undone
        self.basis_mass: torch.Tensor | None = None

    def packed(self) -> None:
        """Attend to the sealed blocks, tile by tile."""
        if not self.view.entries:
            return
        assert self.view.frozen is not None
        keys, values = self.view.frozen
        query, bias = keys.chain.query(self.running.query)
        query = self.store.packers[0].codec.expand_query(query)
        column = self.view.sinks
        for blocks, valid, starts in self._tiles():
            key = self._decode("k", blocks, valid, starts)
            value = self._decode("v", blocks, valid, starts)
            raw = query @ key.transpose(-1, -2)
            if bias is not None:
                raw = raw + bias  # exact tokens are stored un-centred, so q.mu does not cancel
            weights, fade = self.running.weigh(raw, self.stored_mask(slice(column, column + key.shape[1])))
            summed, mass = weights @ value, weights.sum(-1, keepdim=True)
            if self.basis_sum is not None and self.basis_mass is not None:
                summed, mass = summed + self.basis_sum * fade, mass + self.basis_mass * fade
            self.basis_sum, self.basis_mass = summed, mass
            column += key.shape[1]
        # undone here, while the running maximum still is the one these sums were taken under
        assert self.basis_sum is not None and self.basis_mass is not None
        self.running.sum = values.chain.output(
            self.store.packers[1].codec.reduce_output(self.basis_sum), self.basis_mass
        )

    def exact(self, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Attend to the exact tokens of the store."""
        if key.shape[1]:
            self.running.add(key.float(), value.float(), bias)

    def chunk(self, key: torch.Tensor, value: torch.Tensor, start: int, causal: bool) -> None:
        """Attend to the chunk itself; `start` is the first query position's place in it."""
        positions, tokens = self.running.positions, key.shape[1]
        for at in range(0, tokens, TILE):
            end = min(at + TILE, tokens)
            bias = None
            if self.mask is not None:
                bias = _visible(self.mask, self.store.length + at, self.store.length + end)
            elif causal and tokens > 1:
                if at > start + positions - 1:
                    break
                bias = causal_bias(positions, at - start, end - start, key.device)
            self.running.add(key[:, at:end].float(), value[:, at:end].float(), bias)

    def result(self) -> torch.Tensor:
        return self.running.result()

    def stored_mask(self, tokens: slice | torch.Tensor) -> torch.Tensor | None:
        """Additive mask of stored tokens, given by their index in the sequence."""
        if self.mask is None:
            return None
        columns = self.view.columns
        if columns is None and isinstance(tokens, slice):
            return _visible(self.mask, tokens.start, tokens.stop)
        index = tokens if columns is None else columns[tokens]
        return as_bias(self.mask[..., index])

    def _tiles(self) -> Iterator[tuple[list[int], list[int], torch.Tensor]]:
        """Yield (block ids, valid tokens, first positions) of at most `TILE` tokens."""
        entries, block = self.view.entries, self.store.block
        size = max(1, TILE // block)
        start = self.view.origin + self.view.sinks
        for at in range(0, len(entries), size):
            tile = entries[at : at + size]
            starts = []
            for entry in tile:
                starts.append(start)
                start += entry.valid
            yield (
                [entry.block for entry in tile],
                [entry.valid for entry in tile],
                torch.tensor(starts, device=self.store.device),
            )

    def _decode(self, side: str, blocks: list[int], valid: list[int], starts: torch.Tensor) -> torch.Tensor:
        """Decode blocks to (kv_heads, tokens, width), unused slots dropped."""
        assert self.view.frozen is not None
        frozen = self.view.frozen[0 if side == "k" else 1]
        x = decode(self.store.pool.read(side, blocks), frozen.table)  # [n, G, P, D]
        offset = frozen.offset(starts, x.shape[-1])
        if offset is not None:
            x = x + offset.unsqueeze(-2)
        if all(count == self.store.block for count in valid):
            return x.transpose(0, 1).flatten(1, 2)
        return torch.cat([x[i, :, :count] for i, count in enumerate(valid)], dim=1)


def causal_bias(positions: int, first: int, last: int, device: torch.device) -> torch.Tensor | None:
    """Additive causal mask (1, positions, last - first); key ``j`` stands at `first` + j, query ``i`` at i."""
    if last <= 1:
        return None
    keys = torch.arange(first, last, device=device)
    hidden = keys[None] > torch.arange(positions, device=device)[:, None]
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)[None]


def as_bias(mask: torch.Tensor) -> torch.Tensor:
    """Additive fp32 mask of a bool (True = visible) or additive float mask."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


def _visible(mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return as_bias(mask[..., start:stop])


def _exact_tokens(view: RowView) -> slice | torch.Tensor:
    """Sequence indices of the exact tokens: the sinks, then the tail that follows the packed ones."""
    exact = view.key.shape[1]
    if not view.packed:
        return slice(0, exact)
    index = torch.arange(exact, device=view.key.device)
    return torch.where(index < view.sinks, index, index + view.packed)
