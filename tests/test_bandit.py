"""Credit and losses together find a known optimum: the Boltzmann bandit.

One state, one-token responses out of V = 8. The policy that maximises E[score] - kl_coef * KL(pi || pi_ref)
is pi*(a) ~ pi_ref(a) * exp(score(a) / kl_coef). Whitening scales the step, not the optimum: at pi* every
action earns the same reward, and the advantages are zero.
"""

import pytest
import torch
from torch import Tensor

from rlhf import credit, losses, ops

ACTIONS = 8
KL_COEF = 0.5
ITERATIONS = 150
BATCH = 512


def optimum(scores: Tensor, ref_logits: Tensor) -> Tensor:
    """pi* by its formula: [V] probabilities."""
    weight = ref_logits.double().softmax(0) * (scores.double() / KL_COEF).exp()
    return weight / weight.sum()


def total_variation(p: Tensor, q: Tensor) -> float:
    return 0.5 * float((p.double() - q.double()).abs().sum())


def train(scores: Tensor, ref_logits: Tensor, draw: torch.Generator) -> Tensor:
    """PPO with a learned baseline from the reference policy on: [V] probabilities."""
    logits, baseline = ref_logits.clone().requires_grad_(), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([logits, baseline], lr=0.05)
    annealed = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=ITERATIONS)
    mask = torch.ones(BATCH, 1, dtype=torch.bool)

    def logprobs_of(table: Tensor, ids: Tensor) -> Tensor:
        return ops.token_logprobs(table.expand(BATCH, 1, ACTIONS), ids)

    for _ in range(ITERATIONS):
        with torch.no_grad():
            ids = torch.multinomial(logits.softmax(0), BATCH, replacement=True, generator=draw).unsqueeze(1)
            old, values = logprobs_of(logits, ids), baseline.expand(BATCH, 1).clone()
            rewards = credit.kl_rewards(scores[ids[:, 0]], old, logprobs_of(ref_logits, ids), mask, KL_COEF)
            advantages, returns = credit.gae(rewards, values, mask, gamma=1.0, lam=0.95)
            advantages = ops.whiten(advantages, mask, *ops.mean_var(ops.moments(advantages, mask)))
        for _ in range(2):
            actor, _ = losses.clipped_policy(logprobs_of(logits, ids), old, advantages, mask, 0.2, BATCH)
            critic, _ = losses.clipped_value(baseline.expand(BATCH, 1), values, returns, mask, 0.2, BATCH)
            optimizer.zero_grad()
            (actor + critic).backward()
            optimizer.step()
        annealed.step()
    return logits.detach().softmax(0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_reaches_the_boltzmann_optimum(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores, ref_logits = torch.randn(2, ACTIONS, generator=draw).unbind()
    best = optimum(scores, ref_logits)
    # Far from the start and from the greedy answer, or reaching it would prove nothing.
    assert total_variation(ref_logits.softmax(0), best) > 0.2 and float(best.max()) < 0.95
    assert total_variation(train(scores, ref_logits, draw), best) < 0.02
