"""The win rate that two policies would have with responses of equal length (AlpacaEval 2, arXiv 2404.04475)."""

import math

import torch
from torch import Tensor

from rlhf.maths.intervals import Interval, student_t

MAX_STEPS = 100
"""Newton steps; the objective is strictly concave with a penalty, and some ten are enough"""


def length_controlled_win_rate(wins: Tensor, longer: Tensor, penalty: float = 0.01) -> float:
    """The win rate at equal length, by a logistic regression of wins on the difference of lengths.

        P(win) = sigmoid(theta + phi tanh(d / s))        win rate at equal length = sigmoid(theta)
        maximise  sum_n mean_p [w log P + (1 - w) log(1 - P)] - penalty / 2 (theta^2 + phi^2)

    d: tokens that the policy's response is longer than the baseline's; s: standard deviation of d. Equation 2 of the
    paper, for one pair of policies: their term for the difficulty of a prompt is left out, because it is estimated from
    many policies. The penalty (a normal prior of standard deviation 10) keeps the estimate finite where one side wins
    all.

    wins: [N, P], 1, 1/2 or 0 for each of P pairs of responses to N prompts; longer: d [N, P]. A prompt weighs 1.
    """
    outcomes, differences = wins.double().flatten(), longer.double().flatten()
    scale = differences.std(correction=0)
    scaled = torch.tanh(differences / scale) if scale > 0 else torch.zeros_like(differences)
    features = torch.stack([torch.ones_like(scaled), scaled], dim=1)
    weight = 1.0 / wins.shape[1]
    parameters = torch.zeros(2, dtype=torch.float64, device=wins.device)
    # Without a difference of lengths, phi has no effect: the identity keeps the matrix regular.
    prior = penalty * torch.eye(2, dtype=torch.float64, device=wins.device)
    if scale == 0:
        prior[1, 1] += 1.0
    for _ in range(MAX_STEPS):
        chance = torch.sigmoid(features @ parameters)
        gradient = weight * features.T @ (outcomes - chance) - prior @ parameters
        curvature = weight * (features.T * (chance * (1 - chance))) @ features + prior
        step = torch.linalg.solve(curvature, gradient)
        parameters = parameters + step
        if step.abs().max() < 1e-12:
            break
    return float(torch.sigmoid(parameters[0]))


def win_rate_at_equal_length(wins: Tensor, longer: Tensor) -> Interval | None:
    """The intercept of the regression of wins on the difference of lengths, with its t interval: least squares,
    w = a + b d. wins [N]: 1, 1/2 or 0; longer: d [N]. None if d does not vary, or N < 4."""
    wins, d = wins.double(), longer.double()
    n, spread = len(d), (d - d.mean()).square().sum().item() if len(d) else 0.0
    if n < 4 or spread == 0:
        return None
    slope = ((d - d.mean()) * wins).sum() / spread
    centre = (wins.mean() - slope * d.mean()).item()
    variance = (wins - centre - slope * d).square().sum().item() / (n - 2)
    half_width = student_t(n - 2) * math.sqrt(variance * (1 / n + d.mean().item() ** 2 / spread))
    return Interval(centre, centre - half_width, centre + half_width)
