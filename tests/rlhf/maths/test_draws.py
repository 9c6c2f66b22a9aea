"""Random streams: every response of every rollout has its own, which nothing beside it moves."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.config.options import SamplingOptions
from rlhf.generation import loop
from rlhf.maths.uniforms import EVALUATION, MINI_BATCHES, ORDER, RESPONSES, stream, torch_stream, uniforms
from step3_ppo import stage
from step3_ppo.rollout import prompts_and_uniforms
from tests.support import tiny


def drawn(seed: int, draw: int, indices: list[int]) -> Tensor:
    """The numbers that the responses to the prompts at `indices` are drawn with."""
    config: Any = SimpleNamespace(seed=seed, response_length=4)
    prompts: Any = [SimpleNamespace(ids=[tiny.BOS], row=None)] * 100
    return prompts_and_uniforms(prompts, indices, config, tiny.PAD, draw)[1]


def test_every_seed_iteration_prompt_and_copy_has_its_own_stream() -> None:
    rows = [
        tuple(row.tolist())
        for seed in (0, 1, 7)
        for draw in (0, 1, 2, 999, stage.HELD_OUT)
        for row in drawn(seed, draw, [0, 0, 1, 1, 63, 63])
    ]
    assert len(set(rows)) == len(rows) == 90


def test_whoever_draws_and_beside_what() -> None:
    whole = drawn(3, 2, [5, 5, 9, 9, 4, 4])
    assert torch.equal(drawn(3, 2, [9, 9]), whole[2:4])  # of another rank, say
    assert torch.equal(uniforms([(3, 2, 9, 1)], 9)[0, :4], whole[3])  # longer responses begin alike


def test_uniform() -> None:
    """Mean and deviation of 200,000 numbers of 2,000 streams, within 4 standard errors."""
    numbers = uniforms([(0, i) for i in range(2000)], 100).flatten()
    assert abs(float(numbers.mean()) - 0.5) < 4 * 12**-0.5 / 200_000**0.5
    assert abs(float(numbers.var()) - 1 / 12) < 4 * 180**-0.5 / 200_000**0.5
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1


def test_the_tokens_of_a_response_have_numbers_of_their_own() -> None:
    """Neighbours in a stream are uncorrelated: the mean of products of variance 1 / 144, within 4 standard errors.

    One number for all tokens of a response would make it 1 / 12.
    """
    numbers = uniforms([(0, i) for i in range(2000)], 100) - 0.5
    for apart in (1, 2):
        products = numbers[:, apart:] * numbers[:, :-apart]
        assert abs(float(products.mean())) < 4 / 12 / products.numel() ** 0.5


def test_a_response_is_the_same_alone_and_beside_others() -> None:
    """And nothing that draws from torch's own stream in between moves it."""
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    model, prompts, sampling = tiny.causal_lm(), tiny.prompts([3, 9, 8]), SamplingOptions(response_length=8)

    def sampled(seed: int, selection: slice = slice(None)) -> list[list[int]]:
        torch.rand(3)
        draws = uniforms([(seed, i) for i in range(3)], 8)
        return backend(model, prompts[selection], sampling, draws[selection]).response_tokens()

    assert sampled(0) == sampled(0) != sampled(1)
    assert [row for i in range(3) for row in sampled(0, slice(i, i + 1))] == sampled(0)


def test_streams_of_two_purposes_share_no_number() -> None:
    """numpy takes a key with zeros at its end for the key without them, so an epoch's order and a response of its first
    row would be the same numbers without the purpose."""
    purposes = (ORDER, RESPONSES, MINI_BATCHES, EVALUATION)
    drawn = [stream(purpose, 7, *more).random(4) for purpose in purposes for more in ((), (1,), (1, 2))]
    assert len(np.unique(drawn)) == len(drawn) * 4
    torch_drawn = [torch.rand(4, generator=torch_stream(purpose, 7)) for purpose in purposes]
    assert len(torch.cat(torch_drawn).unique()) == 4 * len(purposes)
    assert torch.equal(uniforms([(7, 1)], 4)[0], torch.from_numpy(stream(RESPONSES, 7, 1).random(4)))
    assert not torch.equal(uniforms([(7, 1)], 4), uniforms([(7, 1)], 4, EVALUATION))
