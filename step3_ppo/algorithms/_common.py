"""What several algorithms share: KL in the reward, clipping around the rollout's policy, statistics over all ranks."""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.maths import credit as crediting
from rlhf.maths import losses, ops
from rlhf.types import Credit, Rollout
from step3_ppo.config import Step3Config


class KLOptions(Step3Config):
    """How strongly the policy is held to the reference."""

    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL to the reference, in the per-token reward or (grpo) in the loss"""
    kl_target: float | None = Field(None, gt=0)
    """KL of a response, nats, that kl_coef is steered to from iteration to iteration; none: kl_coef stays"""
    kl_horizon: int = Field(10_000, ge=1)
    """responses over which kl_coef changes by at most a fifth; above a fifth of batch_size"""

    @model_validator(mode="after")
    def _slow_enough(self) -> Self:
        if self.kl_target is not None and self.batch_size >= 5 * self.kl_horizon:
            raise ValueError(
                f"kl_horizon {self.kl_horizon}: expected more than a fifth of batch_size {self.batch_size}"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_coef 0: expected more than 0 where kl_target steers it, which multiplies")
        return self


class KLController:
    """The coefficient as it is now; `observe` moves it towards the target (Ziegler et al., arXiv 1909.08593)."""

    def __init__(self, config: KLOptions) -> None:
        self.coef, self._target, self._horizon = config.kl_coef, config.kl_target, config.kl_horizon

    def observe(self, kl: float, episodes: int) -> None:
        """`kl`: mean over the `episodes` responses of an iteration of the KL summed over a response, nats."""
        if self._target is not None:
            self.coef = crediting.adapt_kl_coef(self.coef, kl, self._target, episodes, self._horizon)


class KLRewardConfig(KLOptions):
    """The KL to the reference is a part of the reward."""

    kl_estimator: Literal["k1", "k3"] = "k1"
    """per-token estimate of the KL (Schulman 2020)"""


class GAEConfig(KLRewardConfig):
    """Credit by generalised advantage estimation, which needs a critic."""

    gamma: float = Field(1.0, ge=0, le=1)
    """discount per token"""
    lam: float = Field(0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    whiten_advantages: bool = True
    """advantages get mean 0 and variance 1 over all tokens of the iteration on all ranks"""


class ClippedConfig(Step3Config):
    """A bounded step from the policy that sampled."""

    cliprange: float = Field(0.2, gt=0)
    """the policy's ratio counts within 1 +- cliprange"""


def rewards_of(rollout: Rollout, config: KLRewardConfig, kl_coef: float) -> Tensor:
    """Per-token rewards of a scored rollout, KL penalty and score. [B, T]"""
    assert rollout.scores is not None and rollout.logprobs is not None and rollout.ref_logprobs is not None
    return crediting.kl_rewards(
        rollout.scores, rollout.logprobs, rollout.ref_logprobs, rollout.mask, kl_coef, config.kl_estimator
    )


def gae_credit(rollout: Rollout, config: GAEConfig, kl_coef: float) -> Credit:
    """Advantages and returns of a scored rollout with values, whitened over all ranks if asked for. [B, T]"""
    assert rollout.values is not None
    rewards = rewards_of(rollout, config, kl_coef)
    advantages, returns = crediting.gae(rewards, rollout.values, rollout.mask, config.gamma, config.lam)
    return Credit(whitened(advantages, rollout.mask) if config.whiten_advantages else advantages, returns)


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all tokens of the mask on all ranks. [B, T]"""
    mean, var = ops.mean_var(collectives.sum_over_ranks(ops.moments(advantages, mask)))
    return ops.whiten(advantages, mask, mean, var)


def clipped_loss(
    logprobs: Tensor, rollout: Rollout, credit: Credit, count: Tensor, cliprange: float, dual_clip: float | None = None
) -> losses.Loss:
    """The actor's clipped loss on (part of) a rollout. logprobs [B, T], count = tokens of the optimizer step."""
    assert rollout.logprobs is not None
    return losses.clipped_policy(
        logprobs, rollout.logprobs, credit.advantages, rollout.mask, cliprange, count, dual_clip
    )
