"""Rejection sampling: fine-tune on the best of K responses to each prompt.

Llama 2 did so before PPO (arXiv 2307.09288, section 3.2.3), RAFT instead of it (arXiv 2304.06767). Llama 2 also keeps
the best of earlier iterations; here each iteration learns from its own responses alone.
"""

import torch
from torch import Tensor

from rlhf.maths import credit as crediting
from rlhf.maths import losses
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import BestOfNConfig as Config
from step3_ppo.algorithms import Iteration


class BestOfN:
    """Credit is 1 on every token of a chosen response and 0 elsewhere; the loss is that of fine-tuning.

    K responses from pi and the best of them learned to the end make the policy
        pi'(y) = F(y)^K - F(y-)^K
    with F the distribution function of pi in the order of the scores; its KL to pi is at most ln K - (K - 1) / K
    (arXiv 2401.01879).
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def select(self, rollout: ScoredRollout) -> Tensor:
        """Row numbers [B / K] that are learned from: the best of every K neighbours, the first of equals."""
        group = self.config.num_generations
        assert len(rollout) % group == 0, f"{len(rollout)} responses in groups of {group}"
        best = rollout.scores.reshape(-1, group).argmax(1)
        return best + group * torch.arange(len(best), device=best.device)

    def credit(self, rollout: ScoredRollout, iteration: Iteration) -> Credit:
        """Advantages 1 on the tokens of chosen responses, 0 on others; returns: the score on every token. [B, T]"""
        chosen = rollout.scores.new_zeros(len(rollout)).index_fill(0, self.select(rollout), 1.0)
        returns = crediting.on_every_token(rollout.scores, rollout.mask)
        return Credit(crediting.on_every_token(chosen, rollout.mask), returns)

    def policy_loss(
        self, logprobs: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, iteration: Iteration
    ) -> losses.Loss:
        """-sum logprobs / count over the tokens of chosen responses, on (part of) a rollout. logprobs [B, T].

        `count` = tokens of the optimizer step. Metrics: nll; approx_kl, the k3 estimate of KL(old || new).
        """
        loss, metrics = losses.token_nll(logprobs, rollout.mask & (credit.advantages > 0), count)
        approx_kl = losses.kl_penalty(rollout.logprobs, logprobs.detach(), rollout.mask, "k3", count)
        return loss, {**metrics, "approx_kl": approx_kl}


def build(config: Config) -> BestOfN:
    return BestOfN(config)
