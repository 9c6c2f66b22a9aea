"""Products that share an input as one product, without a copy of the weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from rlhf.kernels import compiling, decoding, joined
from tests.support import tiny


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("neighbours", [True, False], ids=["neighbours", "apart"])
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "plain"])
def test_products_are_those_of_each_weight(neighbours: bool, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are one product; each result is a sum of 5 products and a bias below 10."""
    layer = nn.Module()
    layer.a, layer.b, layer.c = (nn.Linear(5, n, bias=biased) for n in (3, 4, 2))
    modules = [layer.a, layer.b, layer.c]
    if neighbours:
        joined.join_weights(layer)
    x, calls, linear = normal(2, 1, 5, seed=0), [0], F.linear
    monkeypatch.setattr(F, "linear", lambda *operands: (calls.append(1), linear(*operands))[1])
    weights, biases = [m.weight for m in modules], [m.bias for m in modules if biased]
    got = joined.products(x, weights, biases)
    want = torch.cat([x.double() @ m.weight.double().mT + (m.bias.double() if biased else 0.0) for m in modules], -1)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=6 * 10 * torch.finfo(torch.float32).eps)
    assert sum(calls) == (1 if neighbours else 3)


def test_neighbours_follow_each_other_without_a_gap() -> None:
    rows = normal(9, 4, seed=0)
    assert joined.adjacent(rows.split([2, 3, 4])) and joined.adjacent([rows]) and joined.adjacent([])
    assert not joined.adjacent([rows[:2], rows[3:]]) and not joined.adjacent([rows[2:4], rows[:2]])
    assert not joined.adjacent([rows[:2, :2], rows[2:]]) and not joined.adjacent([rows[:2], rows[2:].mT])


def test_weights_stay_what_they_were(tmp_path: Path) -> None:
    """The same parameters with the same numbers, those that are trained apart from the others; saved without more."""
    lm, before = tiny.causal_lm("qwen2"), tiny.causal_lm("qwen2").state_dict()
    parameters = list(lm.parameters())
    attention, mlp = lm.model.layers[0].self_attn, lm.model.layers[0].mlp
    mlp.up_proj.weight.requires_grad_(False)
    decoding.compile_decoding(lm)
    assert all(x is y for x, y in zip(lm.parameters(), parameters, strict=True))
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight, before[name]), name
    queries, keys, values = attention.q_proj, attention.k_proj, attention.v_proj
    assert joined.adjacent([queries.weight, keys.weight, values.weight])
    assert joined.adjacent([queries.bias, keys.bias, values.bias])
    assert mlp.up_proj.weight.untyped_storage().data_ptr() != mlp.gate_proj.weight.untyped_storage().data_ptr()
    for folder, model in (("joined", lm), ("apart", tiny.causal_lm("qwen2"))):
        model.save_pretrained(tmp_path / folder)
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("joined", "apart")]
    assert sizes[0] == sizes[1]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "joined").state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in before.items())


def test_a_step_of_training_moves_neighbours_as_it_moves_others() -> None:
    losses = []
    for join in (False, True):
        lm = tiny.causal_lm("llama")
        if join:
            for layer in compiling.layers(lm):
                joined.join_weights(layer)
        optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
        for _ in range(3):
            loss = lm(input_ids=torch.arange(4, 20).view(2, 8), labels=torch.arange(4, 20).view(2, 8)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
