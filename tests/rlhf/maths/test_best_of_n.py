"""Best-of-n against all subsets, and its KL against a density."""

import itertools

import numpy as np
import pytest
import torch

from rlhf.evaluation.results_table import selections
from rlhf.maths import best_of_n


def test_the_expected_score_is_the_mean_over_all_subsets() -> None:
    generator = torch.Generator().manual_seed(0)
    selector, scores = (torch.rand(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    for n in (1, 2, 4, 6):
        subsets = list(itertools.combinations(range(6), n))
        by_hand = []
        for by, of in zip(selector.tolist(), scores.tolist(), strict=True):
            chosen = [max((by[i], i) for i in subset)[1] for subset in subsets]
            by_hand.append(np.mean([of[i] for i in chosen]))
        assert best_of_n.expected_score(selector, scores, n).tolist() == pytest.approx(by_hand, rel=1e-12)


def test_without_a_difference_nothing_is_gained() -> None:
    selector = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    flat = torch.full((5, 8), 0.3) * torch.arange(1, 6)[:, None]
    assert [each.share for each in selections("p", selector, flat)] == [None, None, None]
    assert [each.share for each in selections("p", selector, selector)] == pytest.approx([1.0, 1.0, 1.0])


def test_the_kl_is_that_of_the_density_of_the_best() -> None:
    u = (np.arange(100_000) + 0.5) / 100_000  # the best of n uniform numbers has the density n u^(n - 1)
    density = 5 * u**4
    assert best_of_n.kl(5) == pytest.approx((density * np.log(density)).mean(), rel=1e-6)


@pytest.mark.parametrize(("k", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes(k: int, expected: list[int]) -> None:
    assert best_of_n.sizes(k) == expected
