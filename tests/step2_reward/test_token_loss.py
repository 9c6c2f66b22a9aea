"""The pairwise loss at every token: which tokens are compared, and its value, both worked by hand."""

import math

import pytest
import torch

from data.batches import pair_batch
from data.prepare.encode import Preference
from rlhf.maths import losses
from step2_reward import objectives
from step2_reward.config import RewardConfig
from step2_reward.objectives.every_token import compared_columns

PROMPT = (3, 4)


def pair(chosen: tuple[int, ...], rejected: tuple[int, ...]) -> Preference:
    return Preference(PROMPT + chosen, PROMPT + rejected, len(PROMPT))


def test_tokens_are_compared_where_both_responses_have_one_and_have_differed() -> None:
    """Of (5 6 7 8) and (5 9 7) columns 3 and 4 of 0 to 4: the 5 is common, the 8 is alone. One response that begins the
    other never differs from it. The third pair differs at once."""
    pairs = pair_batch([pair((5, 6, 7, 8), (5, 9, 7)), pair((5, 6), (5, 6, 7)), pair((8,), (9, 5))], pad_id=0)
    columns = [row.nonzero().flatten().tolist() for row in compared_columns(pairs.stacked())]
    assert columns == [[3, 4], [], [2]]


def test_padding_that_is_a_real_id_is_not_compared() -> None:
    """The padding has the id 7, with which one response goes on where the other has ended."""
    pairs = pair_batch([pair((5,), (6, 7)), pair((5, 6, 6), (6, 5, 5))], pad_id=7)
    assert compared_columns(pairs.stacked()).sum(1).tolist() == [1, 3]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_the_loss_is_a_mean_over_tokens_then_over_pairs() -> None:
    """Gaps 1 and -2 in the first pair, none in the second, 0.5 in the third; a fourth pair is elsewhere."""
    chosen = torch.tensor([[9.0, 1.5, 0.0], [1.0, 2.0, 3.0], [0.5, 0.0, 0.0]], requires_grad=True)
    rejected = torch.tensor([[-9.0, 0.5, 2.0], [4.0, 5.0, 6.0], [0.0, 7.0, 7.0]])
    mask = torch.tensor([[False, True, True], [False, False, False], [True, False, False]])
    weight = torch.tensor([1.0, 1.0, 0.5])
    loss = losses.token_logistic(chosen, rejected, mask, weight, 4.0)
    expected = ((softplus(-1.0) + softplus(2.0)) / 2 + 0.5 * softplus(-0.5)) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert chosen.grad is not None and torch.equal(chosen.grad != 0, mask)
    smoothed = losses.token_logistic(chosen, rejected, mask, None, 4.0, label_smoothing=0.25)
    of = {gap: 0.75 * softplus(-gap) + 0.25 * softplus(gap) for gap in (1.0, -2.0, 0.5)}
    assert smoothed.item() == pytest.approx(((of[1.0] + of[-2.0]) / 2 + of[0.5]) / 4, rel=1e-6)


def test_of_responses_of_one_token_it_is_the_loss_of_the_scores() -> None:
    chosen, rejected = torch.tensor([[0.3], [-1.2]]), torch.tensor([[0.1], [0.4]])
    everywhere = torch.ones(2, 1, dtype=torch.bool)
    options = {"centering": 0.3, "label_smoothing": 0.1}
    of_scores = losses.pairwise_logistic(chosen[:, 0], rejected[:, 0], **options)
    assert torch.allclose(losses.token_logistic(chosen, rejected, everywhere, None, 2.0, **options), of_scores)


def test_label_smoothing_reaches_the_loss_of_the_scores_and_of_the_tokens() -> None:
    """Of responses of one token both are the same number, worked by hand. Each token scores a tenth of its id."""
    objective = objectives.load(RewardConfig(objective="every_token,token_coef=0.5,label_smoothing=0.2"))
    sides = pair_batch([pair((5,), (9,)), pair((8,), (6,))], pad_id=0).stacked()
    scalars = (sides.ids * 0.1).requires_grad_()
    scored = objectives.ScoredPairs(*scalars[:, -1].chunk(2), torch.ones(2), sides=sides, scalars=scalars)
    one = sum(0.8 * softplus(-gap) + 0.2 * softplus(gap) for gap in (-0.4, 0.2)) / 2
    value, metrics = objective.loss(scored, torch.tensor(2.0))
    assert value.item() == pytest.approx(1.5 * one, rel=1e-6)
    assert metrics["token_loss"].item() == pytest.approx(one, rel=1e-6)
