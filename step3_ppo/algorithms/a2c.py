"""Advantage actor-critic: one step on fresh samples, nothing clipped (arXiv 1602.01783, 2205.09123)."""

import math

from torch import Tensor

from rlhf.maths import losses
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import A2CConfig as Config
from step3_ppo.algorithms import Iteration
from step3_ppo.algorithms._credit import gae_credit


class A2C:
    """PPO's credit; the plain policy gradient, as at ratio 1 no clip binds; a squared error for the critic."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def credit(self, rollout: ScoredRollout, iteration: Iteration) -> Credit:
        """Advantages by GAE, and returns. [B, T]"""
        return gae_credit(rollout, self.config, iteration)

    def policy_loss(
        self, logprobs: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, iteration: Iteration
    ) -> losses.Loss:
        """-sum A * ratio / count, whose gradient at ratio 1 is -sum A * grad logprob / count."""
        old, unclipped = rollout.logprobs, (math.inf, math.inf)
        return losses.clipped_policy(logprobs, old, credit.advantages, rollout.mask, unclipped, count)

    def value_loss(
        self, values: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, iteration: Iteration
    ) -> losses.Loss:
        """0.5 * sum (V - return)^2 / count."""
        return losses.clipped_value(values, values.detach(), credit.returns, rollout.mask, math.inf, count)


def build(config: Config) -> A2C:
    return A2C(config)
