"""Parts of credit that several algorithms share: the KL in the reward, generalised advantage estimation, whitening."""

from torch import Tensor

from rlhf.distributed import collectives
from rlhf.maths import credit as crediting
from rlhf.maths import ops
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithm_options import GAEConfig
from step3_ppo.algorithms import Iteration


def rewards_of(rollout: ScoredRollout, kl_coef: float) -> Tensor:
    """Per-token rewards of a scored rollout, KL penalty and score. [B, T]"""
    return crediting.kl_rewards(rollout.scores, rollout.logprobs, rollout.ref_logprobs, rollout.mask, kl_coef)


def gae_credit(rollout: ScoredRollout, config: GAEConfig, iteration: Iteration) -> Credit:
    """Advantages and returns of a scored rollout with values, whitened over all ranks if the options say so. [B, T]

    While the critic is pretrained, lambda is 1: the returns are sums of rewards, without its own values (VC-PPO, arXiv
    2503.01491, section 3.1).
    """
    assert rollout.values is not None
    rewards = rewards_of(rollout, iteration.kl_coef)
    lam = 1.0 if iteration.pretrains_critic else config.lam
    advantages, returns = crediting.gae(rewards, rollout.values, rollout.mask, config.gamma, lam)
    return Credit(whitened(advantages, rollout.mask) if config.whiten_advantages else advantages, returns)


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all tokens of the mask on all ranks. [B, T]"""
    mean, var = ops.mean_var(collectives.sum_over_ranks(ops.moments(advantages, mask)))
    return ops.whiten(advantages, mask, mean, var)
