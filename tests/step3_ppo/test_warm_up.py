"""While the critic warms up, the policy takes no step, and afterwards it learns as a policy does at its start."""

import pytest
import torch

from rlhf.engine.training import Engine
from tests.support.engine_runs import ALONE
from tests.support.players import ONE_STEP, SHARED, Players, on_course, players

pytestmark = pytest.mark.usefixtures("ranks")

RATE, RATE_OF_HEAD, DECAY = 1e-3, 3e-3, 0.1


def shared(stage: int) -> Players:
    options = {"critic_warmup_iterations": 4, "total_episodes": 48, "weight_decay": DECAY, "zero_stage": stage}
    options |= {"critic_learning_rate": RATE_OF_HEAD, "lr_scheduler_type": "constant"}
    return players("ppo", **SHARED, **ONE_STEP, **options, learning_rate=RATE, max_grad_norm=1.0)


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: weight.double().clone() for name, weight in engine.fp32_weights()}


@pytest.mark.parametrize("stage", ALONE)
def test_weights_of_the_policy_take_no_step(stage: int) -> None:
    """The oracle: AdamW's first step is w (1 - rate * decay) - rate * g / (|g| + eps), so its largest is `rate`.

    If four steps of a zero gradient were counted, it would be 0.44 to 0.66 of that, by beta_2.
    """
    game = shared(stage)
    course, before = on_course(game), masters(game.actor)
    assert [next(course)["value_learning_rate"] for _ in range(4)] == pytest.approx([RATE_OF_HEAD] * 4)
    after = masters(game.actor)
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == {"score.weight"}
    rates = next(course)
    assert rates["policy_learning_rate"] == pytest.approx(RATE)
    assert rates["value_learning_rate"] == pytest.approx(RATE_OF_HEAD)
    shares = []
    for name, weight in masters(game.actor).items():
        decayed = after[name] * (1 - RATE * DECAY * (weight.dim() > 1 and not name.endswith("bias")))
        if name != "score.weight":
            shares.append(float(((decayed - weight) / RATE).abs().max()))
    assert max(shares) == pytest.approx(1.0, abs=1e-2)  # |g| / (|g| + 1e-5) of its largest gradient
