"""The win rate at equal length: recovered from what its model predicts, at limits, and at the optimum by autograd."""

import math

import pytest
import torch

from rlhf.maths.length_control import length_controlled_win_rate, win_rate_at_equal_length


def draw(prompts: int = 40, pairs: int = 2) -> torch.Tensor:
    return torch.randn(prompts, pairs, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30 + 30


@pytest.mark.parametrize(("theta", "phi"), [(0.7, 1.3), (-0.4, 2.0), (0.0, -0.8)])
def test_it_recovers_what_its_model_predicts(theta: float, phi: float) -> None:
    """Wins that are the chances themselves: without a penalty the optimum is exact. The raw win rate is not."""
    longer = draw()
    chances = torch.sigmoid(theta + phi * torch.tanh(longer / longer.std(correction=0)))
    at_equal_length = 1 / (1 + math.exp(-theta))
    assert length_controlled_win_rate(chances, longer, penalty=0.0) == pytest.approx(at_equal_length, abs=1e-9)
    assert abs(chances.mean().item() - at_equal_length) > 0.02


@pytest.mark.parametrize("penalty", [0.1, 1.0])
def test_it_is_the_optimum(penalty: float) -> None:
    """The gradient of the objective, written once more, is 0 there."""
    longer = draw()
    wins = (draw(pairs=2).flip(0) > 8).double() * 0.5 + 0.25
    rate = length_controlled_win_rate(wins, longer, penalty)
    theta = torch.tensor(math.log(rate / (1 - rate)), dtype=torch.float64, requires_grad=True)
    features = torch.tanh(longer / longer.std(correction=0))
    low, high = -20.0, 20.0
    for _ in range(200):  # of phi, by bisection: the objective is concave
        phi = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        chance = torch.sigmoid(theta + phi * features)
        likelihood = (wins * chance.log() + (1 - wins) * (1 - chance).log()).mean(1).sum()
        objective = likelihood - penalty / 2 * (theta**2 + phi**2)
        of_theta, of_phi = torch.autograd.grad(objective, (theta, phi))
        low, high = (float(phi), high) if of_phi > 0 else (low, float(phi))
    assert abs(float(of_theta)) < 1e-9 and abs(float(of_phi)) < 1e-9


def test_limits() -> None:
    longer = draw()
    wins = (longer > 30).double()
    mirrored = length_controlled_win_rate(1 - wins, -longer)
    assert length_controlled_win_rate(wins, longer) + mirrored == pytest.approx(1.0, abs=1e-12)
    equal = torch.zeros_like(longer)
    assert length_controlled_win_rate(wins, equal, penalty=0.0) == pytest.approx(wins.mean().item(), abs=1e-12)
    assert 0.9 < length_controlled_win_rate(torch.ones_like(longer), longer) < 1
    longer_wins = length_controlled_win_rate((longer > 0).double(), longer)  # length alone decides
    assert abs(longer_wins - 0.5) < 0.1 < abs((longer > 0).double().mean().item() - 0.5)


def test_the_win_rate_at_equal_length_is_the_intercept_of_least_squares() -> None:
    draw = torch.Generator().manual_seed(0)
    longer = torch.randint(-5, 12, (40,), generator=draw).double()
    wins = torch.randint(0, 3, (40,), generator=draw).double() / 2
    features = torch.stack([torch.ones_like(longer), longer], 1)
    solved = torch.linalg.lstsq(features, wins[:, None])
    residual = (wins - features @ solved.solution[:, 0]).square().sum() / 38
    deviation = (residual * torch.linalg.inv(features.T @ features)[0, 0]).sqrt().item()
    rate = win_rate_at_equal_length(wins, longer)
    assert rate is not None and rate.mean == pytest.approx(solved.solution[0, 0].item(), rel=1e-12)
    assert rate.half_width == pytest.approx(2.02439 * deviation, rel=1e-3), "t of 38 degrees"
    assert win_rate_at_equal_length(wins, torch.full((40,), 3.0)) is None
    assert win_rate_at_equal_length(wins[:3], longer[:3]) is None
