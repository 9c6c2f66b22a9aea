"""Credit and losses of every algorithm against the equations, token by token in plain Python floats (float64)."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.maths import ops
from rlhf.types import Credit, ScoredRollout
from step3_ppo.algorithms import Iteration, _credit
from tests.contracts.test_algorithms import built, losses_and_gradients, moved, rollout
from tests.support.players import first

GROUP = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"gamma": 0.9, "lam": 0.5, "cliprange": 0.1, "cliprange_value": 0.3},
    "a2c": {"gamma": 0.9, "lam": 0.5},
    "reinforce": {"gamma": 0.9, "cliprange": 0.1},
    "rloo": {"num_generations": GROUP, "cliprange": 0.1, "cliprange_high": 0.25},
    "grpo": {"num_generations": GROUP, "cliprange": 0.1},
}
KL_COEF = 0.3
"""what the controller has made of the option, which is another"""
LATER = Iteration(3, [], KL_COEF)

Table = list[list[float]]
each = pytest.mark.parametrize("name", OPTIONS)


def algorithm(name: str, **changes: Any) -> Any:
    return built(name, **{**OPTIONS[name], **changes})


def table(x: Tensor | None, mask: Tensor) -> Table:
    """The numbers on the mask, a list for each response."""
    assert x is not None
    return [row[mask_row].tolist() for row, mask_row in zip(x.detach().double(), mask, strict=True)]


def rewards(r: ScoredRollout) -> Table:
    old, ref = table(r.logprobs, r.mask), table(r.ref_logprobs, r.mask)
    per_token = [[-KL_COEF * (p - q) for p, q in zip(*pair, strict=True)] for pair in zip(old, ref, strict=True)]
    for row, score in zip(per_token, r.scores.double().tolist(), strict=True):
        row[-1] += score
    return per_token


def gae(r: ScoredRollout, gamma: float, lam: float) -> tuple[Table, Table]:
    """Advantages as the sum of (gamma lam)^l delta_{t+l}, and returns."""
    advantages, returns = [], []
    for reward, value in zip(rewards(r), table(r.values, r.mask), strict=True):
        following = [*value[1:], 0.0]
        delta = [a + gamma * b - c for a, b, c in zip(reward, following, value, strict=True)]
        sums = [sum((gamma * lam) ** i * d for i, d in enumerate(delta[t:])) for t in range(len(delta))]
        advantages.append(sums)
        returns.append([a + v for a, v in zip(sums, value, strict=True)])
    return advantages, returns


def white(rows: Table) -> Table:
    every = [x for row in rows for x in row]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in every) / len(every))
    return [[(x - mean) / deviation for x in row] for row in rows]


def on_tokens(numbers: list[float], r: ScoredRollout) -> Table:
    return [[x] * int(length) for x, length in zip(numbers, r.lengths, strict=True)]


def credit_by_hand(name: str, r: ScoredRollout) -> tuple[Table, Table]:
    options, scores = OPTIONS[name], r.scores.double().tolist()
    if name in ("ppo", "a2c"):
        advantages, returns = gae(r, options["gamma"], options["lam"])
        return (white(advantages) if name == "ppo" else advantages), returns
    if name == "reinforce":
        returns = [[sum(0.9**i * x for i, x in enumerate(row[t:])) for t in range(len(row))] for row in rewards(r)]
        return white(returns), returns
    groups = [list(range(i - i % GROUP, i - i % GROUP + GROUP)) for i in range(len(r))]
    if name == "rloo":
        totals = [sum(row) for row in rewards(r)]
        baselines = [sum(totals[j] for j in group if j != i) / (GROUP - 1) for i, group in enumerate(groups)]
        return on_tokens([t - o for t, o in zip(totals, baselines, strict=True)], r), on_tokens(totals, r)
    means = [sum(scores[j] for j in group) / GROUP for group in groups]
    stds = [math.sqrt(sum((scores[j] - m) ** 2 for j in g) / (GROUP - 1)) for g, m in zip(groups, means, strict=True)]
    centred = [(s - m) / (std + 1e-4) for s, m, std in zip(scores, means, stds, strict=True)]
    return on_tokens(centred, r), on_tokens(scores, r)


@each
def test_credit(name: str) -> None:
    r = rollout()
    player = algorithm(name)
    credit = player.credit(r, LATER)
    for values, expected in zip((credit.advantages, credit.returns), credit_by_hand(name, r), strict=True):
        for row, other in zip(table(values, r.mask), expected, strict=True):
            assert row == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_a_critic_that_is_pretrained_learns_sums_of_rewards(name: str) -> None:
    """A response of two tokens. Rewards (1, 2) under values (3, 5), gamma 1: deltas are (3, -3), so that
    advantages of lambda 0.5 are (1.5, -3) and returns (4.5, 2). While the critic is pretrained lambda is 1, and returns
    are the sums of rewards (3, 2)."""
    r = rollout()[torch.tensor([3])].trimmed()
    short = torch.arange(r.mask.shape[1]) < 2
    same = r.logprobs
    values = torch.zeros_like(same).index_copy(1, torch.arange(2), torch.tensor([[3.0, 5.0]]))
    # The reward of the first token is 1: its log-prob lies 1 / KL_COEF below the reference's.
    ref = same.clone()
    ref[0, 0] += 1 / KL_COEF
    r = replace(r, mask=short[None], values=values, ref_logprobs=ref, scores=torch.tensor([2.0]))
    for pretrains, advantages, returns in ((False, [1.5, -3.0], [4.5, 2.0]), (True, [0.0, -3.0], [3.0, 2.0])):
        player = algorithm(name, gamma=1.0, whiten_advantages=False)
        credit = player.credit(r, replace(LATER, pretrains_critic=pretrains))
        assert table(credit.advantages, r.mask)[0] == pytest.approx(advantages, abs=1e-5)
        assert table(credit.returns, r.mask)[0] == pytest.approx(returns, abs=1e-5)


def policy_loss_of_a_token(name: str, new: float, old: float, ref: float, advantage: float) -> float:
    ratio = math.exp(new - old)
    if name == "a2c":
        return -advantage * ratio
    high = 1.25 if name == "rloo" else 1.1
    loss = -min(advantage * ratio, advantage * min(max(ratio, 0.9), high))
    return loss + KL_COEF * (new - ref) ** 2 / 2 if name == "grpo" else loss


@each
def test_policy_loss(name: str) -> None:
    r = rollout()
    player, (logprobs, _) = algorithm(name), moved(rollout())
    credit = player.credit(r, LATER)
    rows = zip(*(table(x, r.mask) for x in (logprobs, r.logprobs, r.ref_logprobs, credit.advantages)), strict=True)
    tokens = [policy_loss_of_a_token(name, *token) for row in rows for token in zip(*row, strict=True)]
    # A part of a step: `count` is that of the whole.
    loss, metrics = player.policy_loss(logprobs, r, credit, torch.tensor(100), LATER)
    assert loss.item() == pytest.approx(sum(tokens) / 100, abs=1e-5)
    if name == "grpo":
        apart = (logprobs - r.ref_logprobs)[r.mask].double()
        assert metrics["kl_loss"].item() == pytest.approx(apart.square().sum().item() / 200, abs=1e-5)
        assert not metrics["kl_loss"].requires_grad


@pytest.mark.parametrize("name", ["ppo", "reinforce", "rloo", "grpo"])
@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_how_tokens_and_responses_weigh(name: str, aggregation: str) -> None:
    """A step of 4 responses of at most 10 tokens; an empty response adds 0. `count` cancels."""
    r = rollout(lengths=torch.tensor([6, 1, 3, 5, 2, 6, 0, 1]))
    player, (logprobs, _) = algorithm(name, loss_aggregation=aggregation), moved(r)
    credit, total, step = player.credit(r, LATER), 0.0, replace(LATER, step_responses=4)
    columns = (table(x, r.mask) for x in (logprobs, r.logprobs, r.ref_logprobs, credit.advantages))
    for response in zip(*columns, strict=True):
        tokens = [policy_loss_of_a_token(name, *token) for token in zip(*response, strict=True)]
        total += sum(tokens) / (10 if aggregation == "constant" else max(1, len(tokens)))
    for count in (24, 100):
        loss, _ = player.policy_loss(logprobs, r, credit, torch.tensor(count).double(), step)
        assert loss.item() == pytest.approx(total / 4, abs=1e-5)


def test_tokens_that_the_sampler_chose_too_often_weigh_less() -> None:
    """The sampler gave tokens 2, 1, 1/2 and 1/8 times the probability of the trainer: weights 1/2, 1, 2 and 4, the cap;
    at ratio 1 the gradient of the loss is -A w / count, A = 3."""
    r = rollout(lengths=torch.full((8,), 4))[:1].trimmed()
    factors = torch.tensor([[2.0, 1.0, 0.5, 0.125]])
    r = replace(r, sampled_logprobs=r.logprobs + factors.log())
    three = torch.full_like(r.logprobs, 3.0)
    logprobs = r.logprobs.clone().requires_grad_()
    player = algorithm("ppo", tis_cap=4.0)
    loss, metrics = player.policy_loss(logprobs, r, Credit(three, three), torch.tensor(4.0), LATER)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -3 * torch.tensor([[0.5, 1.0, 2.0, 4.0]]) / 4, rtol=1e-5, atol=0)
    assert metrics["tis_weight"].item() == pytest.approx(7.5 / 4) and metrics["tis_capped"].item() == 0.25
    assert metrics["ratio_mean"].item() == 1.0


def test_a_response_has_one_ratio() -> None:
    """GSPO: log ratios (0.3, -0.1) and (-0.3) are ratios exp(0.1) and exp(-0.3). With advantages 1 and -1 and the clip
    0.2 the first counts as it is, the second as 0.8; with advantage 1 its gradient is its ratio, half to each token."""
    r = rollout()[torch.tensor([4, 1])].trimmed()
    logprobs = (r.logprobs + torch.tensor([[0.3, -0.1], [-0.3, 9.0]])).requires_grad_()
    options = {"importance_sampling_level": "sequence", "loss_aggregation": "sequence", "cliprange": 0.2}
    player = algorithm("grpo", **options)
    advantages = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    without_kl = replace(LATER, kl_coef=0.0, step_responses=2)
    loss, metrics = player.policy_loss(logprobs, r, Credit(advantages, advantages), torch.tensor(3.0), without_kl)
    assert loss.item() == pytest.approx((-math.exp(0.1) + 0.8) / 2, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.tensor([[-math.exp(0.1) / 4, -math.exp(0.1) / 4], [0.0, 0.0]])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    assert metrics["ratio_mean"].item() == pytest.approx((2 * math.exp(0.1) + math.exp(-0.3)) / 3)
    of_tokens = [math.exp(d) - 1 - d for d in (0.3, -0.1, -0.3)]
    assert metrics["approx_kl"].item() == pytest.approx(sum(of_tokens) / 3, abs=1e-6)


@pytest.mark.parametrize("fill", [7.0, -1e30, math.inf, math.nan])
def test_with_every_weight_parts_add_up_and_padding_changes_no_bit(fill: float) -> None:
    weighed = {"importance_sampling_level": "sequence", "loss_aggregation": "sequence", "tis_cap": 0.7}
    player, lengths = algorithm("grpo", **weighed), torch.tensor([6, 1, 3, 5, 2, 6, 0, 1])
    iteration = first(player)
    clean, dirty = rollout(0.0, lengths), rollout(fill, lengths)
    credit, count = player.credit(clean, iteration), clean.mask.sum().double()
    expected = losses_and_gradients(player, clean, credit)
    assert all(map(torch.equal, losses_and_gradients(player, dirty, credit, fill), expected))
    logprobs = moved(clean)[0]
    parts = [player.policy_loss(logprobs[i], clean[i], credit[i], count, iteration) for i in torch.arange(8).split(3)]
    assert sum(part.item() for part, _ in parts) == pytest.approx(expected[0].item(), abs=1e-6)
    whole = player.policy_loss(logprobs, clean, credit, count, iteration)[1]
    for key, value in whole.items():
        assert sum(metrics[key].item() for _, metrics in parts) == pytest.approx(value.item(), abs=1e-6), key


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_value_loss(name: str) -> None:
    r = rollout()
    player, (_, values) = algorithm(name), moved(rollout())
    credit = player.credit(r, LATER)
    rows = zip(*(table(x, r.mask) for x in (values, r.values, credit.returns)), strict=True)
    total = 0.0
    for new, old, target in (token for row in rows for token in zip(*row, strict=True)):
        near = min(max(new, old - 0.3), old + 0.3) if name == "ppo" else new
        total += 0.5 * max((new - target) ** 2, (near - target) ** 2)
    loss, _ = player.value_loss(values, r, credit, torch.tensor(100), LATER)
    assert loss.item() == pytest.approx(total / 100, abs=1e-5)


@pytest.mark.parametrize("name", ["ppo", "reinforce"])
def test_whitening_is_over_all_ranks(name: str) -> None:
    """Two ranks with shares of unequal size, scores and lengths have what one rank has of the whole."""
    r, player = rollout(), algorithm(name)
    whole = player.credit(r, LATER).advantages
    shares = [torch.tensor([0, 3, 4, 5, 6, 7]), torch.tensor([1, 2])]

    def raw(share: Tensor) -> Tensor:
        with mock.patch.object(_credit.ops, "whiten", lambda x, *_: x):
            return ops.moments(player.credit(r[share], LATER).advantages, r.mask[share])

    for mine, theirs in (shares, shares[::-1]):
        elsewhere = raw(theirs)
        with mock.patch.object(collectives, "sum_over_ranks", lambda here, elsewhere=elsewhere: here + elsewhere):
            advantages = player.credit(r[mine], LATER).advantages
        torch.testing.assert_close(advantages, whole[mine], rtol=0, atol=1e-5)
