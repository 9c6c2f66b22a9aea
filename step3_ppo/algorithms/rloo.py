"""RLOO: the other responses to a prompt are the baseline (arXiv 2402.14740)."""

from rlhf.maths import credit as crediting
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import RLOOConfig as Config
from step3_ppo.algorithms import Iteration
from step3_ppo.algorithms._clipping import Clipped
from step3_ppo.algorithms._credit import rewards_of, whitened


class RLOO(Clipped):
    """Credit is the response's reward, score and KL together, minus the mean of the others'."""

    config: Config

    def credit(self, rollout: ScoredRollout, iteration: Iteration) -> Credit:
        """R_i = sum_t reward_t; every token's advantage is R_i - mean_{j != i} R_j. [B, T]"""
        c = self.config
        totals = rewards_of(rollout, iteration.kl_coef).sum(1)
        returns = crediting.on_every_token(totals, rollout.mask)
        advantages = crediting.on_every_token(crediting.leave_one_out(totals, c.num_generations), rollout.mask)
        return Credit(whitened(advantages, rollout.mask) if c.whiten_advantages else advantages, returns)


def build(config: Config) -> RLOO:
    return RLOO(config)
