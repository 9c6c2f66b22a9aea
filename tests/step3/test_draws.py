"""Random streams: every seed, iteration and rank samples from its own, and the same again from the same."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from rlhf import dist
from rlhf.generation import loop
from rlhf.options import SamplingOptions
from step3_ppo import stage
from tests import tiny


def stream(seed: int, draw: int, rank: int) -> int:
    """What the random stream of a rollout starts from."""
    found: list[int] = []

    def generate(actor: Any, backend: Any, prompts: Any, sampling: Any, generator: torch.Generator, *_: Any) -> None:
        found.append(generator.initial_seed())

    scorer = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=tiny.PAD), sampling=None)
    players: Any = SimpleNamespace(actor=SimpleNamespace(device=torch.device("cpu")), backend=None, scorer=scorer)
    config: Any = SimpleNamespace(seed=seed, rollout_batch_size=1)
    prompts: Any = [SimpleNamespace(ids=[tiny.BOS], row=None)]
    with mock.patch.object(stage, "generate", generate), mock.patch.object(dist, "rank", lambda: rank):
        stage.sample(players, prompts, [0], config, draw)
    return found[0]


def test_every_seed_iteration_and_rank_has_its_own_stream() -> None:
    places = [(seed, draw, rank) for seed in (0, 1, 7) for draw in (0, 1, 2, 999, 2**20) for rank in (0, 1, 63)]
    assert len({stream(*place) for place in places}) == len(places)
    assert [stream(*place) for place in places] == [stream(*place) for place in places]


def test_the_generator_decides_whatever_else_is_drawn() -> None:
    """Nothing that draws from torch's own stream in between, on one rank and not on another, moves a response."""
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    model, prompts, sampling = tiny.causal_lm(), tiny.prompts([3, 9, 8]), SamplingOptions(response_length=8)

    def sampled(seed: int) -> list[list[int]]:
        torch.rand(3)
        return backend(model, prompts, sampling, torch.Generator().manual_seed(seed)).response_tokens()

    assert sampled(0) == sampled(0) != sampled(1)
