"""GRPO: scores against those of the same prompt, the KL as a loss (arXiv 2402.03300; Dr. GRPO 2503.20783; GSPO
2507.18071)."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.maths import credit as crediting
from rlhf.maths import losses, ops
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithms import Iteration
from step3_ppo.algorithms._clipping import Clipped, ClippedConfig, response_weights
from step3_ppo.kl import KLOptions


class Config(KLOptions, ClippedConfig):
    """GRPO: no critic, no KL in the reward; a group's mean is the baseline."""

    num_generations: int = Field(4, ge=2)
    """responses sampled for each prompt; batch_size counts responses"""
    scale_rewards: bool = True
    """divide by the group's standard deviation; off (Dr. GRPO): prompts whose scores vary more weigh more"""
    scale_rewards_by: Literal["group", "batch"] = "group"
    """scale_rewards: batch = divide by the standard deviation of all scores of the iteration instead"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """what the clipped ratio is of: token; sequence = the whole response, whose probability has the power 1 / length
    (GSPO, with loss_aggregation sequence and a cliprange of about 3e-4)"""
    kl_coef: float = Field(0.04, ge=0)
    """weight of the KL to the reference in the loss (TRL's beta)"""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """per-token estimate of the KL in the loss; k2 has the gradient of the KL of a token given those before it, k3 is
    the paper's"""

    def score_scale(self, deviation: float) -> float:
        return 1.0 if self.scale_rewards else deviation


class GRPO(Clipped):
    """Credit is the score minus its group's mean, on every token of the response."""

    config: Config

    def credit(self, rollout: ScoredRollout, iteration: Iteration) -> Credit:
        """A_i = (score_i - mean of its group) [/ std of its group, or of all scores]. [B, T]"""
        c, scores = self.config, rollout.scores
        centred = crediting.group_relative(scores, c.num_generations, c.scale_rewards and c.scale_rewards_by == "group")
        if c.scale_rewards and c.scale_rewards_by == "batch":  # arXiv 2508.08221, section 4.2
            every = torch.ones_like(scores, dtype=torch.bool)
            _, variance = ops.mean_var(collectives.sum_over_ranks(ops.moments(scores, every)))
            centred = centred / (variance.sqrt() + crediting.EPSILON)
        returns = crediting.on_every_token(rollout.scores, rollout.mask)
        return Credit(crediting.on_every_token(centred, rollout.mask), returns)

    def policy_loss(
        self, logprobs: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, iteration: Iteration
    ) -> losses.Loss:
        """Clipped loss + kl_coef * KL, tokens weighted alike in both, on (part of) a rollout; logprobs [B, T]."""
        c, mask = self.config, rollout.mask
        if c.importance_sampling_level == "sequence":
            of_responses = losses.response_logprobs(logprobs, rollout.logprobs, mask)
            loss, metrics = super().policy_loss(of_responses, rollout, credit, count, iteration)
            approx_kl = losses.kl_penalty(rollout.logprobs, logprobs.detach(), mask, "k3", count)
            metrics["approx_kl"] = approx_kl  # of tokens, as that of every algorithm
        else:
            loss, metrics = super().policy_loss(logprobs, rollout, credit, count, iteration)
        weights = response_weights(mask, count, c, iteration)
        kl = losses.kl_penalty(logprobs, rollout.ref_logprobs, mask, c.kl_estimator, count, weights)
        return loss + iteration.kl_coef * kl, {**metrics, "kl_loss": kl.detach()}


def build(config: Config) -> GRPO:
    return GRPO(config)
