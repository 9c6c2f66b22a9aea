"""Best-of-n against all subsets, and its KL against a density; what a policy is worth against laws known otherwise."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.evaluation.results_table import selections
from rlhf.maths import best_of_n
from rlhf.maths.intervals import mean_interval, student_t


def test_the_expected_score_is_the_mean_over_all_subsets() -> None:
    generator = torch.Generator().manual_seed(0)
    selector, scores = (torch.rand(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    curves = best_of_n.expected_scores(selector, scores)
    for n in range(1, 7):
        subsets = list(itertools.combinations(range(6), n))
        by_hand = []
        for by, of in zip(selector.tolist(), scores.tolist(), strict=True):
            chosen = [max((by[i], i) for i in subset)[1] for subset in subsets]
            by_hand.append(np.mean([of[i] for i in chosen]))
        assert curves[:, n - 1].tolist() == pytest.approx(by_hand, rel=1e-12)


def test_the_weights_of_many_responses_are_those_of_integers() -> None:
    """lgamma of 257 is 1168: three of them lose 10 of 53 bits."""
    one_each = torch.eye(256, dtype=torch.float64)  # prompt i has the score 1 at place i only
    curves = best_of_n.expected_scores(torch.arange(256.0).expand(256, 256), one_each)
    for i, n in ((256, 1), (256, 256), (200, 100), (131, 130), (2, 3)):
        exact = math.comb(i - 1, n - 1) / math.comb(256, n)
        assert curves[i - 1, n - 1].item() == pytest.approx(exact, rel=2.0**-40)


def test_without_a_difference_nothing_is_gained() -> None:
    selector = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    flat = torch.full((5, 8), 0.3) * torch.arange(1, 6)[:, None]
    assert [each.share for each in selections("p", selector, flat)] == [None, None, None]
    assert [each.share for each in selections("p", selector, selector)] == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize("n", [5, 2, 1.4, 3.5])
def test_the_kl_is_that_of_the_density_of_the_best(n: float) -> None:
    u = (np.arange(100_000) + 0.5) / 100_000  # the best of n uniform numbers has the density n u^(n - 1)
    low = int(n)
    density = (low + 1 - n) * low * u ** (low - 1) + (n - low) * (low + 1) * u**low
    exact = (density * np.log(density)).mean()
    assert best_of_n.kl(n) == pytest.approx(exact, rel=1e-6) if n == low else best_of_n.kl(n) > exact
    assert best_of_n.size_at(best_of_n.kl(n)) == pytest.approx(n, rel=1e-7)


@pytest.mark.parametrize(("k", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes(k: int, expected: list[int]) -> None:
    assert best_of_n.sizes(k) == expected


CURVE = torch.tensor([0.0, 1.0, 1.5, 1.75], dtype=torch.float64).repeat(4, 1)
"""the same gains of best-of-1 to best-of-4 at each of four prompts"""


@pytest.mark.parametrize(("gain", "n"), [(-0.5, 1.0), (0.0, 1.0), (0.5, 1.5), (1.25, 2.5), (1.75, 4.0), (9.0, 4.0)])
def test_a_gain_is_worth_the_n_at_which_the_curve_has_it(gain: float, n: float) -> None:
    worth = best_of_n.worth(torch.full((4,), gain), CURVE)
    assert (worth.low, worth.mean, worth.high) == (n, n, n)  # every prompt has the same gain


def test_the_interval_counts_prompts_with_and_without_samples() -> None:
    """By hand. Gains 0.9, 1.1, 0.8, 1.2 of four prompts have the variance 0.1 / 3; the curve n - 1 of the first two is
    exact, so the interval is 1 +- t_1 sqrt(0.1 / 12), and n is one more. If the curves are a (n - 1) with a = 0.9 and
    1.1, and the gains are all 1, their mean has the variance 2^2 (0.1^2 + 0.1^2) / 12 at n = 2."""
    curve = torch.arange(200, dtype=torch.float64)
    exact = best_of_n.worth(torch.tensor([0.9, 1.1, 0.8, 1.2], dtype=torch.float64), torch.stack([curve] * 2))
    half = student_t(1) * math.sqrt(0.1 / 12)
    assert (exact.mean, exact.low, exact.high) == pytest.approx((2.0, max(1.0, 2.0 - half), 2.0 + half), rel=1e-9)
    varied = best_of_n.worth(torch.ones(4, dtype=torch.float64), torch.stack([0.9 * curve, 1.1 * curve]))
    spread = student_t(1) * math.sqrt(4 * 0.02 / 12)  # times n - 1
    assert varied.mean == pytest.approx(2.0) and varied.low == pytest.approx(1 + 1 / (1 + spread), rel=1e-9)


def worlds(prompts: int, measured: int, k: int, count: int, policy: float) -> list[tuple[Tensor, Tensor]]:
    """(gains of a policy whose mean is `policy` standard deviations above, gains of best-of-n) of normal scores."""
    generator, result = torch.Generator().manual_seed(0), []
    for _ in range(count):
        mean, scale = torch.randn(prompts, 1, generator=generator), 0.5 + torch.rand(prompts, 1, generator=generator)
        start = mean + scale * torch.randn(prompts, k, generator=generator)
        policy_scores = mean + scale * (policy + torch.randn(prompts, 1, generator=generator))
        own = start[:, :1].clone()
        own[:measured] = start[:measured].mean(1, keepdim=True)
        best = best_of_n.expected_scores(start[:measured], start[:measured]) - own[:measured]
        result.append(((policy_scores - own).squeeze(1), best))
    return result


def test_the_interval_has_each_n_whose_mean_difference_may_be_0() -> None:
    [(gains, best)] = worlds(30, 30, 16, 1, policy=1.2)
    worth = best_of_n.worth(gains, best)
    for n in range(1, 17):
        difference = mean_interval(best[:, n - 1] - gains)
        assert (difference.low <= 0 <= difference.high) == (worth.low <= n <= worth.high)
    assert 1 < worth.low < worth.mean < worth.high


@pytest.mark.parametrize(("prompts", "measured"), [(32, 32), (100, 20)])
def test_19_of_20_intervals_have_the_true_n(prompts: int, measured: int) -> None:
    """The best of five normal numbers is 1.16296 standard deviations above their mean (Tippett 1925). Of 300 runs 285
    are expected to have it, with a standard deviation of 3.8: five of them below is 266."""
    worlds_of_five = worlds(prompts, measured, 12, 300, policy=1.16296)
    intervals = [best_of_n.worth(gains, best) for gains, best in worlds_of_five]
    assert sum(each.low <= 5 <= each.high for each in intervals) >= 266
    # With a KL that varies, and whose mean is that of the best of eight: 1.42360.
    generator = torch.Generator().manual_seed(1)
    nats = [best_of_n.kl(8) + torch.randn(prompts, generator=generator) for _ in worlds_of_five]
    ratios = [best_of_n.efficiency(*world, each) for world, each in zip(worlds_of_five, nats, strict=True)]
    assert sum(each is not None and each.low <= 1.16296 / 1.42360 <= each.high for each in ratios) >= 266


def test_the_efficiency_has_the_error_of_the_jackknife() -> None:
    [(gains, best)] = worlds(200, 200, 16, 1, policy=1.0)
    nats = 1.5 + torch.randn(200, generator=torch.Generator().manual_seed(1))
    n = best_of_n.size_at(nats.mean().item())
    curve = np.interp(n, np.arange(1, 17), best.mean(0).numpy())

    def without(i: int) -> float:
        others = torch.arange(200) != i
        ratio = best_of_n.efficiency(gains[others], best[others], nats[others])
        assert ratio is not None
        return ratio.mean

    ratio = best_of_n.efficiency(gains, best, nats)
    assert ratio is not None and ratio.mean == pytest.approx(gains.mean().item() / curve, rel=1e-6)
    error = math.sqrt(199 * np.var([without(i) for i in range(200)]))
    assert ratio.half_width == pytest.approx(student_t(199) * error, rel=0.05)  # equal but for terms of 1 / 200


def test_beyond_the_curve_the_efficiency_is_the_ratio_to_its_end() -> None:
    gains = torch.full((4,), 0.875)
    beyond = best_of_n.efficiency(gains, CURVE, torch.full((4,), 9.0))
    assert beyond is not None and (beyond.low, beyond.mean, beyond.high) == (0.5, 0.5, 0.5)
    assert best_of_n.efficiency(gains, CURVE, torch.full((4,), -0.1)) is None  # the KL of a policy that has not moved
    assert best_of_n.efficiency(gains, torch.zeros(4, 4), torch.ones(4)) is None


def test_the_gibbs_policy_of_two_scores_by_hand() -> None:
    """A quarter of the responses has the score 3, the others 1: all is said by the probability p of the former."""
    scores = torch.tensor([[1.0, 1.0, 1.0, 3.0] * 4] * 2)
    p = 0.7
    nats = p * math.log(p / 0.25) + 0.3 * math.log(0.3 / 0.75)
    found = best_of_n.gibbs(scores, nats)
    assert found == pytest.approx((2 * (p - 0.25), 1 / (p**2 / 4 + 0.3**2 / 12)), rel=1e-6)
    assert best_of_n.gibbs(scores, math.log(4) + 0.01) is None  # more than that of always the best
    assert best_of_n.gibbs(torch.ones(2, 4), 0.1) is None


def test_the_gibbs_policy_of_normal_scores_gains_the_root_of_twice_the_kl() -> None:
    """Where the sample has the size of 10 or more that docs/metrics.md asks for, the weights lose 4 % at most."""
    scores = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    for nats in (0.25, 1.0):
        found = best_of_n.gibbs(scores, nats)
        assert found is not None and found[1] > 10
        assert 0.96 < found[0] / math.sqrt(2 * nats) < 1.01
    few = best_of_n.gibbs(scores, 3.0)
    assert few is not None and few[1] < 10
