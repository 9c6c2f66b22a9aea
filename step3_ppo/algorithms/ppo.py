"""PPO with a per-token KL reward, as InstructGPT ran it (arXiv 1707.06347, 1909.08593, 2203.02155)."""

import math

from torch import Tensor

from rlhf.maths import losses
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import PPOConfig as Config
from step3_ppo.algorithms import Iteration
from step3_ppo.algorithms._clipping import Clipped
from step3_ppo.algorithms._credit import gae_credit


class PPO(Clipped):
    """Credit by GAE over KL-penalised rewards; clipped losses for actor and critic."""

    config: Config

    def credit(self, rollout: ScoredRollout, iteration: Iteration) -> Credit:
        """Advantages and returns of a scored rollout, whitened over all ranks."""
        return gae_credit(rollout, self.config, iteration)

    def value_loss(
        self, values: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, iteration: Iteration
    ) -> losses.Loss:
        """The critic's loss on (part of) a rollout, not clipped while it is pretrained; values [B, T]."""
        assert rollout.values is not None
        cliprange = math.inf if iteration.pretrains_critic else self.config.cliprange_value
        return losses.clipped_value(values, rollout.values, credit.returns, rollout.mask, cliprange, count)


def build(config: Config) -> PPO:
    return PPO(config)
