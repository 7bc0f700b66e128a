"""Write-time feedback ("ldlq"): each channel's rounding error is carried into the channels not yet coded.

Scores see a key's error d = x - y through E[(q.d)^2] = d^T M d, M = E[q q^T]. With U the upper Cholesky factor of M^-1
(M^-1 = U^T U), for j = 0..D-1: code x_j, e_j = x_j - y_j, x_i -= e_j U_ji / U_jj for i > j. Then d = U^T f with
f_j = e_j / U_jj, so that d^T M d = <f, f>: every channel pays only for its own rounding. Same bytes, same reader; the
recursion is that of GPTQ and QuIP (arXiv 2210.17323, 2307.13304).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# (channel, its values of shape (kv_heads, rows)) -> codes, uint8, and the values that these stand for
Quantize = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def metric_factor(moment: torch.Tensor, damping: float = 0.1) -> torch.Tensor:
    """Return U of M = moment + damping * mean(diag) * I.

    Parameters
    ----------
    moment : Tensor of shape (kv_heads, head_dim, head_dim)
        E[q' q'^T] of the queries in the transformed basis.
    damping : float

    Returns
    -------
    Tensor of shape (kv_heads, head_dim, head_dim), fp32
        Upper triangular, positive diagonal.
    """
    moment = moment.double()
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))  # no queries seen: the plain metric
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    metric = moment / mean[:, None, None] + damping * eye  # U is used through ratios only, so M is scaled to unit mean
    # M = W W^T with W upper triangular (Cholesky from the last channel up); then M^-1 = U^T U with U = W^-1
    whitening = torch.linalg.cholesky(metric.flip(-2, -1)).flip(-2, -1)
    return torch.linalg.solve_triangular(whitening, eye, upper=True).float().contiguous()


def code_with_feedback(
    x: torch.Tensor, factor: torch.Tensor, quantize: Quantize
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Code the channels in order, carrying errors.

    Parameters
    ----------
    x : Tensor of shape (blocks, kv_heads, tokens, head_dim), fp32
    factor : Tensor of shape (kv_heads, head_dim, head_dim), fp32
        U, from `metric_factor`.
    quantize : callable
        Codes one channel; rows are the tokens of all blocks, block by block (as `to_columns` lays them out).

    Returns
    -------
    codes : Tensor of shape (blocks, kv_heads, tokens, head_dim), uint8
    values : Tensor of the same shape, fp32
        What the codes stand for.
    whitened : Tensor of the same shape, fp32
        f = U^-T (x - values).
    """
    z, step, diagonal = _prepared(x, factor)
    codes, values = torch.empty_like(z, dtype=torch.uint8), torch.empty_like(z)
    for j in range(len(z)):
        codes[j], values[j] = quantize(j, z[j])
        z[j] -= values[j]
        _carry(z, step, j)
    return _to_tokens(codes, x.shape), _to_tokens(values, x.shape), _to_tokens(z / diagonal, x.shape)


def whiten(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return U^-T x for x (blocks, kv_heads, tokens, head_dim): <whiten(a), whiten(b)> = a^T M b.

    This is what the recursion leaves when every channel is coded as 0.
    """
    z, step, diagonal = _prepared(x, factor)
    for j in range(len(z)):
        _carry(z, step, j)
    return _to_tokens(z / diagonal, x.shape)


def _prepared(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Own copy of x by columns, U_ji / U_jj as [j, i, G, 1], and the diagonal of U as [j, G, 1]."""
    step, diagonal = carry_steps(factor)
    columns = to_columns(x).clone(memory_format=torch.contiguous_format)
    return columns, step.permute(1, 2, 0).contiguous()[..., None], diagonal.T[..., None]


def carry_steps(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """U_ji / U_jj as (kv_heads, j, i), and the diagonal of U as (kv_heads, j)."""
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    return (factor / diagonal[..., None]).contiguous(), diagonal.contiguous()


def _carry(z: torch.Tensor, step: torch.Tensor, j: int) -> None:
    # one product and one difference per value, never a sum in some library's order: the bytes depend on it
    z[j + 1 :] -= step[j, j + 1 :] * z[j]


def to_columns(x: torch.Tensor) -> torch.Tensor:
    """Channels first: ``(blocks, kv_heads, tokens, n) -> (n, kv_heads, blocks * tokens)``."""
    return x.permute(3, 1, 0, 2).flatten(-2)


def _to_tokens(columns: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    blocks, heads, tokens, width = shape
    return columns.view(width, heads, blocks, tokens).permute(2, 1, 3, 0).contiguous()
