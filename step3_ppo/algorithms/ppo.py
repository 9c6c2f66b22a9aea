"""PPO with a per-token KL reward, as InstructGPT ran it (arXiv 1707.06347, 1909.08593, 2203.02155)."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from rlhf import credit as crediting
from rlhf import dist, losses, ops
from rlhf.types import Credit, Rollout
from step3_ppo.config import Step3Config


class Config(Step3Config):
    """PPO: a policy and a critic, both clipped around what they were at the rollout."""

    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL penalty to the reference in the per-token reward"""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """per-token estimate of the KL (Schulman 2020)"""
    gamma: float = Field(1.0, ge=0, le=1)
    """discount per token"""
    lam: float = Field(0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    whiten_advantages: bool = True
    """advantages get mean 0 and variance 1 over all tokens of the iteration on all ranks"""
    cliprange: float = Field(0.2, gt=0)
    """the policy's ratio counts within 1 +- cliprange"""
    cliprange_value: float = Field(0.2, gt=0)
    """the value counts within +- cliprange_value of the old one"""


class PPO:
    """Credit by GAE over KL-penalised rewards; clipped losses for actor and critic."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def credit(self, rollout: Rollout) -> Credit:
        """Advantages and returns of a scored rollout, whitened over all ranks."""
        c = self.config
        assert rollout.scores is not None and rollout.logprobs is not None
        assert rollout.ref_logprobs is not None and rollout.values is not None
        rewards = crediting.kl_rewards(
            rollout.scores, rollout.logprobs, rollout.ref_logprobs, rollout.mask, c.kl_coef, c.kl_estimator
        )
        advantages, returns = crediting.gae(rewards, rollout.values, rollout.mask, c.gamma, c.lam)
        if c.whiten_advantages:
            mean, var = ops.mean_var(dist.sum_over_ranks(ops.moments(advantages, rollout.mask)))
            advantages = ops.whiten(advantages, rollout.mask, mean, var)
        return Credit(advantages, returns)

    def policy_loss(self, logprobs: Tensor, rollout: Rollout, credit: Credit, count: Tensor) -> losses.Loss:
        """The actor's loss on (part of) a rollout; logprobs [B, T], count = tokens of the optimizer step."""
        assert rollout.logprobs is not None
        return losses.clipped_policy(
            logprobs, rollout.logprobs, credit.advantages, rollout.mask, self.config.cliprange, count
        )

    def value_loss(self, values: Tensor, rollout: Rollout, credit: Credit, count: Tensor) -> losses.Loss:
        """The critic's loss on (part of) a rollout; values [B, T]."""
        assert rollout.values is not None
        return losses.clipped_value(
            values, rollout.values, credit.returns, rollout.mask, self.config.cliprange_value, count
        )


def build(config: Config) -> PPO:
    return PPO(config)
