"""slim on real keys: floors of KL and top-1 on two models, with text that ships with Python; positions do not matter."""

import pytest

from kvslim.eval.protocol import Protocol
from kvslim.eval.quality import measure_quality, tokenize
from kvslim.eval.text import load_text

ONE = Protocol(prefixes=1)

# recipe, packed bits at most, KL mean at most, top-1 at least
FLOORS = {
    "slim4": (4.32, 0.004, 0.955),
    "slim3": (3.32, 0.015, 0.92),
    "slim2": (2.32, 0.11, 0.83),
    "slim4p": (4.26, 0.013, 0.92),
}


def measured(loaded, recipes, protocol=ONE):
    ids = tokenize(loaded.tokenizer, load_text(None))
    return {row.recipe: row for row in measure_quality(loaded.model, ids, recipes, protocol)}


def check(rows):
    for name, row in rows.items():
        bits, kl, top1 = FLOORS[name]
        assert row.bits_per_value_packed <= bits, name
        assert row.kl_mean <= kl, name
        assert row.top1 >= top1, name


def test_floors_on_large_key_biases(qwen05b):
    check(measured(qwen05b, list(FLOORS)))


def test_floors_on_wide_heads_and_windows(gemma270m):
    check(measured(gemma270m, list(FLOORS)))


@pytest.mark.parametrize("recipe", ["slim4", "slim4p"])
def test_positions_do_not_matter(qwen05b, recipe):
    near = measured(qwen05b, [recipe], Protocol(prefill=512, score=256, prefixes=1))[recipe]
    far = measured(qwen05b, [recipe], Protocol(prefill=512, score=256, prefixes=1, offset_positions=16384))[recipe]
    assert far.kl_mean <= 1.5 * near.kl_mean


def test_rotation_without_balance_fails_on_these_keys(qwen05b):
    """What the floors above are worth: the same bits without slim's basis give nonsense, and a warning says so."""
    with pytest.warns(UserWarning, match="use slim4"):
        row = measured(qwen05b, ["turbo4"], Protocol(prefill=512, score=128, prefixes=1))["turbo4"]
    assert row.kl_mean > 0.05
