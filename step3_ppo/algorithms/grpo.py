"""GRPO: scores against those of the same prompt, the KL as a loss (arXiv 2402.03300; Dr. GRPO 2503.20783; GSPO
2507.18071)."""

import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.maths import credit as crediting
from rlhf.maths import losses, ops
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import GRPOConfig as Config
from step3_ppo.algorithms import Iteration
from step3_ppo.algorithms._clipping import Clipped, response_weights


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
