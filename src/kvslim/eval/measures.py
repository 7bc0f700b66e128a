"""The formulas of the ruler: divergence, agreement and perplexity, as pure functions of log-probabilities.

Divergence is taken in the form ``sum p (log p - log q) - p + q``. For normalized distributions it equals
KL(p || q); unlike the textbook form it does not change to first order when a float32 log-softmax misses its
normalizer by one rounding, which over a large vocabulary is 1e-7 to 1e-6 a token and may make the divergence negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scores:
    """One run against the baseline, one entry per scored token.

    Attributes
    ----------
    kl : Tensor of shape (tokens,), float64
        KL(base || run).
    agrees : Tensor of shape (tokens,), bool
        Whether both put the same token first.
    surprise, base_surprise : Tensor of shape (tokens,), float64
        Minus the log-probability of the true next token.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    surprise: torch.Tensor
    base_surprise: torch.Tensor

    @classmethod
    def of(cls, base: torch.Tensor, run: torch.Tensor, targets: torch.Tensor) -> Scores:
        """Compare two sets of log-probabilities.

        Parameters
        ----------
        base, run : Tensor of shape (tokens, vocabulary), float32
            See `log_probs`.
        targets : Tensor of shape (tokens,)
            True next tokens.
        """
        return cls(token_kl(base, run), agreement(base, run), surprise(run, targets), surprise(base, targets))

    @classmethod
    def join(cls, parts: list[Scores]) -> Scores:
        """Join runs over several chunks or passages."""
        names = ("kl", "agrees", "surprise", "base_surprise")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Float32 log-probabilities of logits of any float dtype."""
    return logits.float().log_softmax(-1)


def token_kl(base: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    """KL(base || run) of every token, in nats.

    Parameters
    ----------
    base, run : Tensor of shape (tokens, vocabulary)
        Log-probabilities.

    Returns
    -------
    Tensor of shape (tokens,), float64
    """
    p = base.exp()
    terms = p * (base - run)
    terms = torch.where(p > 0, terms, 0.0)  # 0 * log 0 is 0, also where a token is masked out in both
    return (terms - p + run.exp()).sum(-1, dtype=torch.float64)


def agreement(base: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    """Whether `base` and `run`, both (tokens, vocabulary), put the same token first."""
    return base.argmax(-1) == run.argmax(-1)


def surprise(run: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Minus the log-probability of each target, float64."""
    return -run.gather(-1, targets[:, None]).squeeze(-1).double()


def perplexity(surprise: torch.Tensor) -> float:
    """Perplexity from the surprise of each token."""
    return float(surprise.mean().exp())


def percentile(values: torch.Tensor, percent: float) -> float:
    """Percentile with linear interpolation."""
    return float(torch.quantile(values.double(), percent / 100))


def trimmed_mean(values: torch.Tensor, percent: float = 1.0) -> float:
    """Mean without the top `percent` of the values: one token in a thousand can carry half of a mean."""
    kept = len(values) - int(len(values) * percent / 100)
    return float(values.double().sort().values[:kept].mean())
