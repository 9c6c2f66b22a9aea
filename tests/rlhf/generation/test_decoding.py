"""Products and attention of single tokens, and the choice of the next one, beside float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlhf.config.options import SamplingOptions
from rlhf.generation import loop
from rlhf.kernels import attention, decoding
from tests.support import tiny

NEAR = 9 * 10 * torch.finfo(torch.float32).eps
"""sums of 9 products of numbers below 10, each addition off by eps at most"""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, False), (torch.bfloat16, True)])
def test_attention_where_our_own_does_not_fit(dtype: torch.dtype, masked: bool) -> None:
    """Without a mask, and in bf16 with heads of odd width: a weighted mean of values, two queries a key."""
    q, k, v = (normal(2, heads, n, 5, seed=i).to(dtype) for i, (heads, n) in enumerate(((4, 1), (2, 7), (2, 7))))
    mask = (torch.arange(7) > torch.tensor([[1], [4]]))[:, None, None] if masked else None
    output = attention._attend_one(q, k, v, mask, 0.3)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=0.3, enable_gqa=True)
    # scores below 2 and weights that add up to 1, each rounded once or twice, and the result
    bound = 8 * torch.finfo(dtype).eps * float(v.abs().max())
    torch.testing.assert_close(output.double(), expected.transpose(1, 2), rtol=0, atol=bound)


def model() -> nn.ModuleDict:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = {"biased": nn.Linear(9, 6), "plain": nn.Linear(9, 7, bias=False), "wide": nn.Linear(9, 4).double()}
        layers["own"] = nn.Linear(9, 3)
        layers["other"] = nn.modules.linear.NonDynamicallyQuantizableLinear(9, 3)
    layers["own"].forward = lambda x: -x  # type: ignore[method-assign]
    return nn.ModuleDict(layers)


def test_layers_multiply_by_sorted_weights_meanwhile() -> None:
    layers, x = model(), normal(2, 1, 9)
    before = {name: type(layer) for name, layer in layers.items()}
    expected = {name: layers[name].double()(x.double()) for name in ("biased", "plain")}
    layers["biased"].float(), layers["plain"].float()
    linear = decoding._linear_layers(layers, decoding._sortable)
    with torch.no_grad(), decoding._multiplying(linear, decoding._SortedLinear):
        assert {name for name, layer in layers.items() if type(layer) is not before[name]} == {"biased", "plain", "own"}
        assert torch.equal(layers["own"](x), -x), "a layer with a pass of its own keeps it"
        for _ in range(2):  # the second time by the weights sorted at the first
            for name, exact in expected.items():
                torch.testing.assert_close(layers[name](x).double(), exact, rtol=0, atol=NEAR)
    assert all(type(layers[name]) is kind for name, kind in before.items())
    assert not decoding._sorted_products()._sorted, "weights that change would be used as they were"


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bf16_layers_multiply_so_where_the_cpu_can(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    layers = model().bfloat16()
    assert len(decoding._linear_layers(layers, decoding._sortable)) == (4 if has_bf16 else 0)


def test_products_of_several_weights_lie_beside_each_other() -> None:
    layers, x = model(), normal(3, 1, 9)
    both = [layers["biased"], nn.Linear(9, 5)]
    products = decoding._sorted_products()
    with torch.no_grad():
        output = products(x, [layer.weight for layer in both], [layer.bias for layer in both])
        exact = torch.cat([F.linear(x.double(), layer.weight.double(), layer.bias.double()) for layer in both], -1)
    assert len(products._sorted) == 1
    products.clear()
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=NEAR)


@pytest.mark.parametrize(("size", "temperature"), [(700, 1.0), (512, 0.5), (40, 2.0)])
def test_a_token_is_the_first_whose_sum_of_probabilities_exceeds_its_number(size: int, temperature: float) -> None:
    """Looked for block by block: among 2.7 blocks, two whole ones, and less than one. In float64 token by token."""
    logits, numbers = 3 * normal(300, size), torch.rand(300, generator=torch.Generator().manual_seed(1)).double()
    numbers[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    token, logprob = loop.choose(logits, temperature, numbers)
    exact = (logits.double() / temperature).log_softmax(-1)
    edges = exact.exp().cumsum(-1)
    sure = (edges - numbers[:, None]).abs().amin(-1) > size * torch.finfo(torch.float32).eps
    assert sure.sum() > 200 and int(token[0]) == 0 and int(token[1]) == size - 1
    assert torch.equal(token[sure], (edges <= numbers[:, None]).sum(-1)[sure])
    # a number below 30, and the log of a sum of weights that are rounded once each
    near = 40 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(logprob.double(), exact.gather(1, token[:, None]).squeeze(1), rtol=0, atol=near)
    greedy, logprob = loop.choose(logits, temperature, None)
    assert torch.equal(greedy, logits.argmax(-1))
    torch.testing.assert_close(logprob.double(), exact.amax(-1), rtol=0, atol=near)


def test_of_a_row_that_is_not_finite_some_token_is_drawn_and_its_log_prob_says_so() -> None:
    logits = normal(3, 600)
    logits[0, 5], logits[1] = torch.nan, -torch.inf
    token, logprob = loop.choose(logits, 1.0, torch.tensor([0.3, 0.9, 0.5], dtype=torch.float64))
    assert ((token >= 0) & (token < 600)).all() and logprob.isnan().tolist() == [True, True, False]
    logits[2, :599] = -torch.inf  # all that can be drawn is the last, in a block that is not full
    token, logprob = loop.choose(logits[2:], 1.0, torch.tensor([0.0], dtype=torch.float64))
    assert token.tolist() == [599] and logprob.tolist() == [0.0]


def test_the_longest_prompt_may_have_the_id_of_padding_in_it() -> None:
    """A mask says what is padding, not an id."""
    prompts, model = tiny.prompts([3, 9]), tiny.causal_lm()
    prompts.ids[1, [4, 8]] = tiny.PAD
    rollout = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))(
        model, prompts, SamplingOptions(response_length=4), None
    )
    inputs = {"input_ids": prompts.ids, "attention_mask": prompts.mask.long()}
    theirs = model.generate(**inputs, do_sample=False, max_new_tokens=4, eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
    assert torch.equal(rollout.response_ids, theirs[:, prompts.ids.shape[1] :])
