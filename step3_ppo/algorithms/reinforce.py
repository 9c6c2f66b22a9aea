"""REINFORCE++: returns instead of a critic, one baseline for the batch, PPO's clip (arXiv 2501.03262)."""

import torch

from rlhf.maths import credit as crediting
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import ReinforceConfig as Config
from step3_ppo.algorithms import Iteration
from step3_ppo.algorithms._clipping import Clipped
from step3_ppo.algorithms._credit import rewards_of, whitened


class Reinforce(Clipped):
    """Credit is the return from each token on, whitened over all tokens of the iteration on all ranks."""

    config: Config

    def credit(self, rollout: ScoredRollout, iteration: Iteration) -> Credit:
        """return_t = reward_t + gamma * return_{t+1}; advantages are whitened returns. [B, T]"""
        rewards = rewards_of(rollout, iteration.kl_coef)
        returns, _ = crediting.gae(rewards, torch.zeros_like(rewards), rollout.mask, self.config.gamma, lam=1.0)
        return Credit(whitened(returns, rollout.mask), returns)


def build(config: Config) -> Reinforce:
    return Reinforce(config)
