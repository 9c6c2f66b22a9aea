"""What several algorithms share: KL in the reward, clipping around the rollout's policy, statistics over all ranks."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from rlhf import credit as crediting
from rlhf import dist, losses, ops
from rlhf.types import Credit, Rollout
from step3_ppo.config import Step3Config


class KLRewardConfig(Step3Config):
    """The KL to the reference is a part of the reward."""

    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL penalty to the reference in the per-token reward"""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """per-token estimate of the KL (Schulman 2020)"""


class ClippedConfig(Step3Config):
    """A bounded step from the policy that sampled."""

    cliprange: float = Field(0.2, gt=0)
    """the policy's ratio counts within 1 +- cliprange"""


def rewards_of(rollout: Rollout, config: KLRewardConfig) -> Tensor:
    """Per-token rewards of a scored rollout, KL penalty and score. [B, T]"""
    assert rollout.scores is not None and rollout.logprobs is not None and rollout.ref_logprobs is not None
    return crediting.kl_rewards(
        rollout.scores, rollout.logprobs, rollout.ref_logprobs, rollout.mask, config.kl_coef, config.kl_estimator
    )


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all tokens of the mask on all ranks. [B, T]"""
    mean, var = ops.mean_var(dist.sum_over_ranks(ops.moments(advantages, mask)))
    return ops.whiten(advantages, mask, mean, var)


def clipped_loss(
    logprobs: Tensor, rollout: Rollout, credit: Credit, count: Tensor, cliprange: float, dual_clip: float | None = None
) -> losses.Loss:
    """The actor's clipped loss on (part of) a rollout. logprobs [B, T], count = tokens of the optimizer step."""
    assert rollout.logprobs is not None
    return losses.clipped_policy(
        logprobs, rollout.logprobs, credit.advantages, rollout.mask, cliprange, count, dual_clip
    )
