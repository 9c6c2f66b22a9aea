"""benchmarks/frozen.py: the features of a pair, the regression, and heads for files that want opposite things."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaModel

from benchmarks import frozen
from data.prepare.encode import Preference


def test_states_are_those_of_each_side_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 5}
    LlamaModel(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)
    # The sides share a prompt of 3 tokens, and the first token of the response.
    pair = Preference(chosen=(5, 6, 7, 8, 9, 10), rejected=(5, 6, 7, 8, 11), prompt_length=3)
    (found,) = frozen.hidden_states(str(tmp_path), [pair])
    model = LlamaModel.from_pretrained(tmp_path)
    model.layers = model.layers[:4]
    with torch.no_grad():
        chosen, rejected = (model(torch.tensor([ids])).last_hidden_state[0] for ids in (pair.chosen, pair.rejected))
    expected = [chosen[-1], chosen[3:].mean(0), rejected[-1], rejected[3:].mean(0), chosen[:3].mean(0)]
    torch.testing.assert_close(found.float(), torch.stack(expected), rtol=2**-10, atol=1e-4)  # fp16 rounds by 2^-11


def test_the_regression_is_at_its_minimum() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).double()
    weight = frozen.logistic(x.float()).double().requires_grad_()
    loss = torch.nn.functional.softplus(-x @ weight).mean() + frozen.PENALTY / 2 * weight.square().sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() < 1e-6


def test_a_head_for_each_file_learns_opposite_preferences() -> None:
    generator = torch.Generator().manual_seed(0)
    states, file = torch.randn(600, 5, 4, generator=generator), torch.arange(600) % 2
    sign = 1.0 - 2 * file
    states[:, 1, 0] = states[:, 3, 0] + sign  # the files prefer more and less of one feature,
    states[:, -1, 0] += 3 * sign  # and their prompts differ by 6 deviations
    one, by_prompt, by_file = frozen.head_scores(states, file == 0, 1, torch.arange(400), torch.arange(400, 600))
    right = [(scores > 0).float().mean().item() for scores in (one, by_prompt, by_file)]
    assert right[0] < 0.65 and min(right[1:]) > 0.95
