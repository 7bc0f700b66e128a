"""torch.compile of a model around a packed cache: the same answers, with graph breaks that say whose they are."""

import pytest
import torch

import kvslim
from kvslim.integrations.transformers import compat
from tiny_models import build, prompt


def forward(model, ids, cache) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits


def test_a_compiled_model_gives_the_same_logits():
    """Compiled is what lies between the layers' attention; its backend does not matter here."""
    model = build("llama", num_hidden_layers=1)
    caches = [kvslim.KVCache(model, "int8+block=8+sinks=2+recent=5") for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    ids = prompt(1, 44)
    for start, stop in ((0, 40), (40, 41), (41, 42), (42, 44)):
        got, want = (forward(m, ids[:, start:stop], c) for m, c in zip((compiled, model), caches, strict=True))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert caches[0].get_seq_length() == 44
    torch._dynamo.reset()


def test_one_whole_graph_is_refused_and_says_why():
    model = build("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="kvslim reads and writes packed bytes outside compiled graphs"):
        forward(compiled, prompt(1, 20), kvslim.KVCache(model, "int8"))
    torch._dynamo.reset()
