"""RLOO: the other responses to a prompt are the baseline (arXiv 2402.14740)."""

from pydantic import Field

from rlhf.maths import credit as crediting
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithms import Iteration
from step3_ppo.algorithms._clipping import Clipped, ClippedConfig
from step3_ppo.algorithms._credit import rewards_of, whitened
from step3_ppo.kl import KLOptions


class Config(KLOptions, ClippedConfig):
    """RLOO: no critic; a whole response is one action, judged against the others to its prompt."""

    num_generations: int = Field(4, ge=2)
    """responses sampled for each prompt (TRL's rloo_k); batch_size counts responses"""
    whiten_advantages: bool = False
    """advantages get mean 0 and variance 1 over all tokens of the iteration on all ranks"""


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
