"""Every algorithm: credit and losses look at the mask alone, add up over parts, and start where the policy is."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import plugins
from rlhf.types import Credit, Message, Row, ScoredRollout
from step3_ppo import algorithms
from tests.support import tiny
from tests.support.players import config_of, first, players, twice_each

ALGORITHMS = plugins.names("step3_ppo.algorithms")
WIDTH = 6
LENGTHS = torch.tensor([6, 1, 3, 5, 2, 6, 4, 1])

each = pytest.mark.parametrize("name", ALGORITHMS)


def built(name: str, **changes: Any) -> Any:
    return algorithms.load(config_of(name, **changes))


def rollout(fill: float = 0.0, lengths: Tensor = LENGTHS) -> ScoredRollout:
    """A scored rollout of 8 responses to 4 prompts, each prompt twice in a row; `fill` stands off the mask."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(WIDTH) < lengths[:, None]

    def values(scale: float, shift: float = 0.0) -> Tensor:
        return (scale * torch.randn(8, WIDTH, generator=draw) + shift).masked_fill(~mask, fill)

    logprobs = values(0.5, -3.0)
    prompts = tuple(Row((Message("user", f"w{4 + b // 2}"),)) for b in range(8))
    return ScoredRollout(
        prompt_ids=torch.full((8, 3), 5),
        prompt_mask=torch.ones(8, 3, dtype=torch.bool),
        response_ids=torch.randint(4, tiny.VOCAB, (8, WIDTH), generator=draw),
        mask=mask,
        sampled_logprobs=logprobs,
        ended=torch.arange(8) % 3 != 0,
        rows=prompts,
        logprobs=logprobs,
        ref_logprobs=values(0.5, -3.0),
        values=values(1.0),
        scores=torch.randn(8, generator=draw),
        source_scores=torch.empty(8, 0),
    )


def moved(r: ScoredRollout, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Log-probs and values a few steps later, with gradients."""
    draw = torch.Generator().manual_seed(9)
    noise = torch.randn(2, *r.mask.shape, generator=draw)[:, :, : r.mask.shape[1]]
    assert r.logprobs is not None and r.values is not None
    logprobs = (r.logprobs + 0.3 * noise[0]).masked_fill(~r.mask, fill)
    values = (r.values + 0.3 * noise[1]).masked_fill(~r.mask, fill)
    return logprobs.requires_grad_(), values.requires_grad_()


def losses_and_gradients(algorithm: Any, r: ScoredRollout, credit: Credit, fill: float = 0.0) -> list[Tensor]:
    """Of the losses it has, each loss; then the gradient of what goes into each."""
    parts = [
        (loss(x, r, credit, r.mask.sum(), first(algorithm))[0], x)
        for loss, x in zip(losses_of(algorithm), moved(r, fill), strict=False)
    ]
    return [loss.detach() for loss, _ in parts] + [torch.autograd.grad(loss, x)[0] for loss, x in parts]


def losses_of(algorithm: Any) -> list[Any]:
    """The loss of the policy, and of the critic if there is one."""
    return [algorithm.policy_loss] + ([algorithm.value_loss] if algorithm.value_loss is not None else [])


@each
@pytest.mark.parametrize("fill", [7.0, -1e30, math.inf, math.nan])
def test_what_stands_off_the_mask_changes_no_bit(name: str, fill: float) -> None:
    algorithm = built(name)
    clean, dirty = rollout(), rollout(fill)
    expected, credit = algorithm.credit(clean, first(algorithm)), algorithm.credit(dirty, first(algorithm))
    assert torch.equal(credit.advantages, expected.advantages) and torch.equal(credit.returns, expected.returns)
    garbage = Credit(*(x.masked_fill(~dirty.mask, fill) for x in (credit.advantages, credit.returns)))
    results = losses_and_gradients(algorithm, dirty, garbage, fill)
    assert all(map(torch.equal, results, losses_and_gradients(algorithm, clean, expected)))


@each
def test_prompts_may_come_in_any_order(name: str) -> None:
    algorithm, r = built(name), rollout()
    order = torch.tensor([4, 5, 0, 1, 6, 7, 2, 3])
    expected, credit = algorithm.credit(r, first(algorithm)), algorithm.credit(r[order], first(algorithm))
    torch.testing.assert_close(credit.advantages, expected.advantages[order], rtol=0, atol=1e-6)
    torch.testing.assert_close(credit.returns, expected.returns[order], rtol=0, atol=1e-6)


@each
@pytest.mark.parametrize("size", [1, 3])
def test_losses_metrics_and_gradients_add_up_over_parts(name: str, size: int) -> None:
    algorithm, r = built(name), rollout()
    credit, count = algorithm.credit(r, first(algorithm)), r.mask.sum()
    for index, loss in enumerate(losses_of(algorithm)):
        x = moved(r)[index]
        iteration = first(algorithm)
        whole, metrics = loss(x, r, credit, count, iteration)
        parts = [loss(x[rows], r[rows], credit[rows], count, iteration) for rows in torch.arange(8).split(size)]
        assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), abs=1e-6)
        for key, value in metrics.items():
            assert value.dim() == 0 and not value.requires_grad
            assert sum(m[key].item() for _, m in parts) == pytest.approx(value.item(), abs=1e-6), key
        together = torch.autograd.grad(whole, x, retain_graph=True)[0]
        apart = torch.autograd.grad(torch.stack([part for part, _ in parts]).sum(), x)[0]
        torch.testing.assert_close(apart, together, rtol=0, atol=1e-7)


@each
def test_one_token_in_all_is_no_trouble(name: str) -> None:
    """The variance of one number is 0, and a response may be empty."""
    algorithm = built(name)
    one = rollout(lengths=torch.tensor([0, 1, 0, 0, 0, 0, 0, 0]))
    credit = algorithm.credit(one, first(algorithm))
    results = [credit.advantages, credit.returns, *losses_and_gradients(algorithm, one, credit)]
    assert all(torch.isfinite(x).all() for x in results)
    assert not credit.advantages[~one.mask].any()


# --- with real engines, through the real rollout and update


@each
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("temperature", "size"), [(1.0, 3), (0.7, 1)])
def test_the_first_minibatch_finds_the_policy_that_sampled(name: str, temperature: float, size: int) -> None:
    """Ratio 1, approximate KL 0, clip fraction 0: the best single test of a PPO implementation."""
    game = players(name, num_ppo_epochs=1, num_mini_batches=1, temperature=temperature, micro_batch_size=size)
    rollout = game.score(game.sample(twice_each()))
    assert not torch.any(rollout.logprobs - rollout.ref_logprobs)  # the reference is the policy, to the bit
    assert float((rollout.logprobs - rollout.sampled_logprobs).abs().max()) < 1e-5
    metrics = game.update(rollout)
    assert {"approx_kl", "first_approx_kl"} <= metrics.keys()
    expected = {"approx_kl": 0.0, "first_approx_kl": 0.0, "clip_fraction": 0.0, "ratio_mean": 1.0}
    for key in expected.keys() & metrics.keys():
        assert metrics[key] == pytest.approx(expected[key], abs=1e-6), key
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.usefixtures("ranks", "vllm")
@pytest.mark.parametrize("backend", plugins.names("rlhf.generation"))
def test_the_first_ratio_is_one_whatever_samples(backend: str) -> None:
    game = players("ppo")
    for seed in range(2):  # from the reference, and from a policy that has moved
        metrics = game.update(game.score(game.sample(twice_each(), seed, backend)))
        assert metrics["first_ratio_std"] < 1e-5
