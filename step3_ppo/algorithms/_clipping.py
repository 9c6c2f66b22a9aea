"""The clipped loss of the policy, which PPO, GRPO, RLOO and REINFORCE share: how far the ratio to the policy that
sampled counts, and what the tokens of a response weigh."""

import torch
from torch import Tensor

from rlhf.maths import losses, ops
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import ClippedConfig
from step3_ppo.algorithms import Iteration


class Clipped:
    """An algorithm whose policy has the clipped loss."""

    def __init__(self, config: ClippedConfig) -> None:
        self.config = config

    def policy_loss(
        self, logprobs: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, iteration: Iteration
    ) -> losses.Loss:
        """The actor's clipped loss on (part of) a rollout. logprobs [B, T], count = tokens of the optimizer step.

        Weights of tokens multiply their advantages, to which the loss of a token is proportional. Metrics with
        `tis_cap`: tis_weight, the mean over tokens; tis_capped, the share of tokens whose ratio is above the cap.
        """
        config, old, mask = self.config, rollout.logprobs, rollout.mask
        advantages, metrics = credit.advantages, {}
        weights = response_weights(mask, count, config, iteration)
        if weights is not None:
            advantages = weights * advantages
        if config.tis_cap is not None:
            ratios = losses.sampling_ratios(old, rollout.sampled_logprobs, mask)
            advantages = ratios.clamp(max=config.tis_cap) * advantages
            metrics["tis_weight"] = ops.masked_mean(ratios.clamp(max=config.tis_cap), mask, count)
            metrics["tis_capped"] = ops.masked_mean((ratios > config.tis_cap).float(), mask, count)
        low, high = config.cliprange, config.cliprange_high
        clip = (low, low if high is None else high)
        loss, clip_metrics = losses.clipped_policy(logprobs, old, advantages, mask, clip, count, config.dual_clip)
        return loss, {**clip_metrics, **metrics}


def response_weights(mask: Tensor, count: Tensor, config: ClippedConfig, iteration: Iteration) -> Tensor | None:
    """The weight of every token of each response [B, 1] that turns the mean over the step's N = `count` tokens into the
    sum that `loss_aggregation` says; None: 1. mask [B, T]

        sequence: 1 / R * sum_i 1 / n_i * sum_t loss_it    GRPO (arXiv 2402.03300, eq. 3)
        constant: 1 / (R * T) * sum_i sum_t loss_it        Dr. GRPO (arXiv 2503.20783), T = response_length

    with R = iteration.step_responses, of which response i has n_i tokens.
    """
    if config.loss_aggregation == "token":
        return None
    lengths = mask.sum(1, keepdim=True).clamp(min=1).float()
    tokens = lengths if config.loss_aggregation == "sequence" else torch.full_like(lengths, config.response_length)
    return count / iteration.step_responses / tokens
