"""The ruler's formulas against values worked out by hand."""

import math

import pytest
import torch

from kvslim.eval import measures
from kvslim.eval.measures import Scores


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_kl_by_hand():
    base, run = logs([0.5, 0.25, 0.25], [0.1, 0.8, 0.1]), logs([0.25, 0.5, 0.25], [0.1, 0.8, 0.1])
    kl = measures.token_kl(base, run)
    assert kl.dtype == torch.float64
    assert kl[0].item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), abs=1e-7)
    assert kl[1].item() == pytest.approx(0.0, abs=1e-7)


def test_kl_of_masked_tokens_is_finite():
    base, run = logs([0.5, 0.5, 0.0]), logs([0.25, 0.75, 0.0])
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert measures.token_kl(base, run).item() == pytest.approx(expected, abs=1e-7)
    assert measures.token_kl(logs([0.5, 0.5]), logs([1.0, 0.0])).item() == math.inf


def test_kl_equals_float64_where_float32_normalizers_do_not():
    torch.manual_seed(0)
    logits = torch.randn(16, 100_000) * 3
    other = logits * (1 + 1e-6 * torch.randn_like(logits))
    exact = _textbook(logits.double().log_softmax(-1), other.double().log_softmax(-1))
    base, run = measures.log_probs(logits), measures.log_probs(other)
    ours = (measures.token_kl(base, run) - exact).abs().max()
    # 1.07e-8 on an AVX2 processor, whose vectors add up 100,000 terms in another order; the textbook's way errs 3.5e-7
    assert ours < 2e-8 < (_textbook(base, run) - exact).abs().max() / 10


def _textbook(base: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    return (base.exp() * (base - run)).sum(-1)


def test_log_probs_are_float32_whatever_the_model_gives():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    probs = measures.log_probs(logits)
    assert probs.dtype == torch.float32
    assert probs.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_agreement_looks_at_the_first_token_only():
    base, run = logs([0.6, 0.3, 0.1], [0.2, 0.5, 0.3]), logs([0.5, 0.1, 0.4], [0.1, 0.4, 0.5])
    assert measures.agreement(base, run).tolist() == [True, False]


def test_perplexity_by_hand():
    surprise = measures.surprise(logs([0.5, 0.5], [0.125, 0.875]), torch.tensor([0, 0]))
    assert surprise.tolist() == pytest.approx([math.log(2), math.log(8)])
    assert measures.perplexity(surprise) == pytest.approx(4.0)


def test_percentile_interpolates():
    values = torch.arange(101.0)
    assert measures.percentile(values, 99) == pytest.approx(99.0)
    assert measures.percentile(values, 99.9) == pytest.approx(99.9)


def test_trimmed_mean_drops_the_top_percent():
    values = torch.cat([torch.ones(198), torch.tensor([1000.0, 5.0])])
    assert measures.trimmed_mean(values) == pytest.approx(1.0)
    assert measures.trimmed_mean(torch.ones(10)) == 1.0, "fewer than a hundred tokens lose none"


def test_scores_join_in_order():
    base, run = logs([0.5, 0.5], [0.9, 0.1]), logs([0.4, 0.6], [0.9, 0.1])
    targets = torch.tensor([0, 1])
    whole = Scores.of(base, run, targets)
    joined = Scores.join([Scores.of(base[i : i + 1], run[i : i + 1], targets[i : i + 1]) for i in range(2)])
    assert torch.equal(whole.kl, joined.kl)
    assert whole.surprise.tolist() == pytest.approx([-math.log(0.4), -math.log(0.1)])
    assert whole.base_surprise.tolist() == pytest.approx([-math.log(0.5), -math.log(0.1)])
