"""Means and win rates over a sample of N prompts, with 95 % confidence intervals."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def mean_interval(values: Tensor, together: int = 1) -> Interval:
    """The mean of `values` [N], N >= 2, with Student's t interval: mean +- t_{N-1} s / sqrt(N).

    together: of how many intervals all shall contain their means in 95 % of runs, however the samples depend on each
        other (Bonferroni): `low` and `high` are then the bounds of 1 - 0.05 / together
    """
    values = values.double()
    mean = values.mean().item()
    half_width = student_t(len(values) - 1, together) * values.std().item() / len(values) ** 0.5
    return Interval(mean, mean - half_width, mean + half_width)


def win_rate_interval(wins: Tensor, together: int = 1) -> Interval:
    """The mean of `wins` [N], each in [0, 1], with the t interval of `wins` plus one prompt won and one prompt lost.
    together: as of `mean_interval`.

    Bonett & Price 2012 (doi 10.3102/1076998611411915) add the same two prompts for paired proportions. Their values are
    0, 1/2 or 1, with the normal quantile; here fractions between are allowed. Without the two prompts, a policy that
    wins everywhere would have an interval of width 0. The percentile bootstrap has the same defect: at 20 prompts and a
    win rate of 0.95 it covers 65 %. Wilson's interval is twice too wide where most prompts tie.
    """
    wins = wins.double()
    around = mean_interval(torch.cat([wins, torch.tensor([0.0, 1.0], dtype=wins.dtype, device=wins.device)]), together)
    return Interval(wins.mean().item(), max(0.0, around.low), min(1.0, around.high))


def ratio_interval(totals: Tensor, counts: Tensor) -> Interval:
    """A mean over the parts of all N units, such as the tokens of rows, with an interval that is paired by unit.

        r = sum_i t_i / sum_i n_i,  interval of the mean of r + (t_i - r n_i) / mean n

    Cochran, Sampling Techniques, 1977, chapter 6: the ratio estimate and its linearised variance.
    totals, counts: t and n [N], N >= 2
    """
    ratio = totals.double().sum() / counts.sum()
    return mean_interval(ratio + (totals.double() - ratio * counts) / counts.double().mean())


def log_odds_change(before: int, after: int, count: int) -> Interval:
    """The change of the log-odds of an event that `before` and then `after` of `count` responses have.

        log((a + 1/2) / (n - a + 1/2)) - log((b + 1/2) / (n - b + 1/2)),  variance: the sum of the four reciprocals

    Haldane 1956 and Anscombe 1956: the halves keep it finite. The responses before and after count as independent.
    """
    cells = [x + 0.5 for x in (after, count - after, before, count - before)]
    change = math.log(cells[0] / cells[1]) - math.log(cells[2] / cells[3])
    half_width = NormalDist().inv_cdf(0.975) * math.sqrt(sum(1 / x for x in cells))
    return Interval(change, change - half_width, change + half_width)


POWER = 2.801585218
"""z_0.975 + z_0.8: standard errors that a gain must have to be shown, at 95 %, with a probability of 80 %"""


def power(prompts: int, deviation: float | None = None) -> str:
    """Which mean gain that many prompts show with a probability of 80 %, and how many a smaller one needs.

        gain = (z_0.975 + z_0.8) s / sqrt(N)

    deviation: s of the gain of a prompt; None: gains are said in this unit
    """
    factor = POWER * (1.0 if deviation is None else deviation)
    gain = factor / math.sqrt(prompts)
    unit = 10.0 ** math.floor(math.log10(gain * 0.8))
    smaller = unit * max(step for step in (1, 2, 5) if step * unit <= gain * 0.8)
    of = " standard deviations" if deviation is None else ""
    needed = math.ceil((factor / smaller) ** 2)
    detected = f"{prompts:,} prompts detect a gain of {gain:.2g}{of} with 80 % power"
    return f"{detected}; a gain of {smaller:.2g} needs {needed:,} prompts"


def pair_wins(first: Tensor, second: Tensor, same: Tensor) -> Tensor:
    """For each pair of responses j != l to a prompt, 1 if `first` has the higher score, and 1/2 for a tie.

        w_njl = 1[first_nj > second_nl] + 1/2 1[first_nj = second_nl]

    first, second: scores [N, K], K >= 2 -> [N, K (K - 1)].
    same [N, K, K]: whether response j of `first` and l of `second` are equal; they tie although rounding may change
    their scores. Pairs with j = l do not count: they were sampled with the same random numbers, so they are not
    independent, and a policy that is slightly better everywhere would win all of them.
    """
    k = first.shape[1]
    assert k >= 2, "pair_wins: with one response of each policy to a prompt there is no independent pair"
    signs = torch.sign(pair_differences(first, second)).masked_fill(_different(same), 0.0)
    return (signs + 1) / 2


def pair_differences(first: Tensor, second: Tensor) -> Tensor:
    """first_nj - second_nl of the pairs of `pair_wins`, float64; [N, K] each -> [N, K (K - 1)]."""
    return _different(first.double()[:, :, None] - second.double()[:, None, :])


def _different(values: Tensor) -> Tensor:
    """The values [N, K, K] off the diagonal, [N, K (K - 1)]."""
    return values[:, ~torch.eye(values.shape[1], dtype=torch.bool, device=values.device)]


def student_t(freedom: int, together: int = 1) -> float:
    """The quantile p = 1 - 0.025 / together of Student's t: exact at 1 and 2 degrees of freedom, from 3 on that of
    Abramowitz & Stegun 26.7.5, which is 0.13 % too small at most for 97.5 %."""
    tail = 0.025 / together
    if freedom == 1:
        return math.tan((0.5 - tail) * math.pi)
    if freedom == 2:
        return (1 - 2 * tail) / math.sqrt(2 * (1 - tail) * tail)
    z = NormalDist().inv_cdf(1 - tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
