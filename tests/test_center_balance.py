"""Transforms that use statistics: means taken out, channels balanced between queries and keys."""

import pytest
import torch

from kvslim.errors import InputError
from kvslim.transforms.balance import Balance, centred_power
from kvslim.transforms.base import Sample, fit_chain
from kvslim.transforms.center import Center
from kvslim.transforms.rope import Rope
from kvslim.transforms.rotate import Rotate

G, T, D = 2, 300, 32


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prior() -> dict[str, torch.Tensor]:
    pairs = torch.stack((torch.arange(D // 2), torch.arange(D // 2) + D // 2))
    return {
        "query_moment": torch.diag_embed(draw(G, D, seed=5).exp()),
        "key_power": draw(G, D, seed=6).exp(),
        "key_mean": draw(G, D, seed=7),
        "random_mean": draw(G, D, seed=8),
        "plain_mean": draw(G, D, seed=9),
        "rope_pairs": pairs,
        "rope_frequency": torch.linspace(1, 0, D // 2).double(),
    }


def sample(with_prior: bool = True, tokens: int = T) -> Sample:
    queries = draw(G, 500, D, seed=1) * draw(D, seed=2).exp()
    keys = draw(G, T, D, seed=3) * draw(D, seed=4).exp() + 5
    return Sample(keys, queries.mT @ queries / 500, block=64, tokens=tokens, prior=prior() if with_prior else {})


@pytest.mark.parametrize("kind", ["static", "random"])
def test_scores_of_centred_keys_come_back_through_the_bias(kind):
    found = Center(kind).fit(sample())
    q = draw(G, 4, D, seed=10)
    mapped, bias = found.query(q)
    assert bias is not None
    scores = mapped @ found.forward(sample().x).mT + bias
    torch.testing.assert_close(scores, q @ sample().x.mT, rtol=0, atol=1e-3)


def test_summed_centred_values_get_their_mean_back():
    found, x = Center("static").fit(sample()), sample().x
    weights = draw(G, 4, T, seed=11).softmax(-1)
    summed = found.output(weights @ found.forward(x), weights.sum(-1, keepdim=True))
    torch.testing.assert_close(summed, weights @ x, rtol=0, atol=1e-4)


def test_static_takes_the_calibration_and_else_the_prompt():
    torch.testing.assert_close(Center("static").fit(sample()).mean, prior()["key_mean"])
    torch.testing.assert_close(Center("static").fit(sample(with_prior=False)).mean, sample().x.mean(1))


def test_page_removes_the_turned_mean_and_gives_it_back_as_offset():
    found = Center("page").fit(sample())
    rope = Rope(prior()["rope_pairs"], prior()["rope_frequency"])
    starts = torch.tensor([100, 5000])
    x = draw(2, G, 64, D, seed=12)
    want = rope.mean_turn(prior()["plain_mean"], starts, 64)
    torch.testing.assert_close(found.forward(x, starts), x - want[:, :, None])
    torch.testing.assert_close(found.offset(starts), want)


def test_page_offset_passes_through_the_transforms_behind_it():
    chain = fit_chain((Center("page"), Balance(), Rotate()), sample())
    starts = torch.tensor([640])
    x = draw(1, G, 64, D, seed=13)
    back = chain.forward(x, starts) + chain.offset(starts)[:, :, None]
    q = draw(G, 3, D, seed=14)
    mapped, bias = chain.query(q)
    assert bias is None
    torch.testing.assert_close(mapped @ back[0].mT, q @ x[0].mT, rtol=0, atol=1e-3)


def test_page_falls_back_to_random_positions_where_rope_is_unknown():
    known = {name: tensor for name, tensor in prior().items() if not name.startswith("rope")}
    found = Center("page").fit(Sample(sample().x, prior=known))
    torch.testing.assert_close(found.mean, prior()["random_mean"])


@pytest.mark.parametrize("kind", ["page", "random"])
def test_means_that_need_a_calibration_say_so(kind):
    with pytest.raises(InputError, match="needs a calibration"):
        Center(kind).fit(sample(with_prior=False))


def test_balance_is_the_fourth_root_of_query_over_key_power():
    given = sample(with_prior=False)
    found = Balance("online").fit(given).weight
    power = given.moment.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found, (power / centred_power(given.x)) ** 0.25)


def test_balance_mixes_prompt_and_prior_by_the_tokens_seen():
    t = 64 / (64 + 256)
    found = Balance().fit(sample(tokens=64)).weight.log()
    own = Balance("online").fit(sample()).weight.log()
    before = Balance("prior").fit(sample()).weight.log()
    before = before + own.mean(-1, keepdim=True) - before.mean(-1, keepdim=True)
    torch.testing.assert_close(found, t * own + (1 - t) * before)


def test_balance_keeps_scores_and_ignores_a_constant_on_all_keys():
    given = sample(with_prior=False)
    found = Balance().fit(given)
    q = draw(G, 4, D, seed=15)
    torch.testing.assert_close(found.query(q)[0] @ found.forward(given.x).mT, q @ given.x.mT, rtol=1e-4, atol=1e-3)
    moved = Balance().fit(Sample(given.x + 100, given.moment, tokens=T)).weight
    torch.testing.assert_close(moved, found.weight, rtol=1e-3, atol=0)


def test_a_dead_channel_keeps_a_finite_weight():
    given = sample(with_prior=False)
    given.x[..., 3] = 0
    given.moment[:, 5] = given.moment[..., 5] = 0
    weight = Balance().fit(given).weight
    assert torch.isfinite(weight).all()
    assert (weight > 0).all()


def test_rotary_pairs_share_a_weight():
    weight = Balance("online", pairs=True).fit(sample()).weight
    torch.testing.assert_close(weight[:, : D // 2], weight[:, D // 2 :], rtol=0, atol=0)
