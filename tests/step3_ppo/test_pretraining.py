"""How much of the variance of the scores the critic's values explain, before and after its pretraining.

What it learns is computed again in float64 in tests/options.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import pvariance

import pytest
import torch

from data.prepare.encode import Preference
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.types import Sequences
from step3_ppo.algorithms import ppo
from step3_ppo.pretraining import check_pretraining, pretrain
from step3_ppo.roles import named_roles
from tests.support import tiny
from tests.support.players import players

pytestmark = pytest.mark.usefixtures("ranks")

PROMPT = (tiny.BOS, 5, 6)
RESPONSES = (((7, 8, 9, tiny.EOS), (10, tiny.EOS)), ((11, tiny.EOS), (12, 7, 9)), ((8,), (9, 9, 8, 10, 7)))
PAIRS = [Preference(PROMPT + chosen, PROMPT + rejected, len(PROMPT)) for chosen, rejected in RESPONSES]


@dataclass
class Data:
    train: list[Preference]
    evaluation: list[Preference]


def scalars(critic: Engine, ids: tuple[int, ...]) -> list[float]:
    """At every token of one row, without padding."""
    row, real = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)
    with critic.inference() as model:
        return model(Sequences(row, real, real))[0].tolist()


def states(critic: Engine) -> Iterator[tuple[float, float]]:
    """The critic's value before each token of the responses, and its number at the last token."""
    for pair in PAIRS:
        for side in (pair.chosen, pair.rejected):
            values = scalars(critic, side)
            yield from ((value, values[-1]) for value in values[len(PROMPT) - 1 : -1])


def test_the_explained_variance_is_that_of_the_scores_before_the_first_step() -> None:
    game = players("ppo", batch_size=2, critic_pretraining_epochs=6.5, critic_learning_rate=3e-2)
    assert game.critic is not None
    start = list(states(game.critic))
    target = [score for _, score in start]

    def explained(values: list[tuple[float, float]]) -> float:
        errors = [score - value for score, (value, _) in zip(target, values, strict=True)]
        return 1 - pvariance(errors) / pvariance(target)

    metrics = pretrain(game.critic, Data(PAIRS, PAIRS), game.config, tiny.PAD)  # type: ignore[arg-type]
    assert metrics["eval_critic_explained_before"] == pytest.approx(explained(start), abs=1e-4)
    assert metrics["eval_critic_explained"] == pytest.approx(explained(list(states(game.critic))), abs=1e-4)
    assert metrics["eval_critic_explained"] > metrics["eval_critic_explained_before"]


@pytest.mark.parametrize("start", ["policy", "shared"])
def test_a_critic_with_a_new_head_is_refused(start: str) -> None:
    config = ppo.Config(critic_model=start, critic_pretraining_epochs=1)
    with pytest.raises(UserError, match=f"new head on the policy .--critic-model {start}., which scores nothing yet"):
        check_pretraining(config, named_roles(config))


def test_scores_that_do_not_vary_have_no_explained_variance() -> None:
    game = players("ppo", batch_size=2, critic_pretraining_epochs=1)
    assert game.critic is not None
    one = [Preference((*PROMPT, 7), (*PROMPT, 7), len(PROMPT))] * 2
    metrics = pretrain(game.critic, Data(one, one), game.config, tiny.PAD)  # type: ignore[arg-type]
    assert all(value != value for value in metrics.values())
