"""Scores by rule: length, repetition, the end token. Every number here is worked by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf import rewards
from rlhf.rewards.repetition import repeated_share
from rlhf.types import SampledRollout
from tests.rlhf.rewards.responses import context, rollout, samples
from tests.support import tiny


def scores(spec: str, r: SampledRollout) -> list[float]:
    result: list[float] = rewards.open_source(spec, context(Path()))(samples(r)).tolist()
    return result


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("target=4,penalty=0.5", [-1.0, 0.0, -2.0]),
        ("target=0", [-0.06, -0.01, -0.08]),
        ("target=8", [0.0, 0.0, 0.0]),
        ("target=4,buffer=4", [-0.5, 0.0, -1.0]),
        ("target=2,buffer=5", [-0.8, 0.0, -1.0]),
        ("target=5,buffer=1", [-1.0, 0.0, -1.0]),
    ],
)
def test_length_of_6_and_1_and_8_tokens(options: str, expected: list[float]) -> None:
    assert scores(f"length,{options}", rollout()) == pytest.approx(expected)


def test_the_buffer_is_dapo_s_soft_overlong_punishment() -> None:
    """L_max 16384 and L_cache 4096: nothing up to 12288, -1/2 in the middle, -1 at the limit and beyond."""
    n = torch.tensor([12288, 12289, 14336, 16384, 16385])
    one = rollout()
    mask = torch.arange(16385) < n[:, None]
    five = replace(
        one[torch.tensor([2] * 5)],
        response_ids=torch.full(mask.shape, 5),
        mask=mask,
        sampled_logprobs=torch.zeros(mask.shape),
    )
    assert scores("length,target=12288,buffer=4096", five) == [0.0, -1 / 4096, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("ids", "n", "expected"),
    [
        ([1, 2, 3, 1, 2, 3], 3, 1 / 4),  # 123 231 312 123
        ([1, 2, 3, 1, 2, 3], 1, 1 / 2),
        ([7] * 10, 3, 7 / 8),
        ([1, 2, 1, 2, 1], 2, 1 / 2),  # 12 21 12 21
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 1], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_the_share_of_repeated_n_grams(ids: list[int], n: int, expected: float) -> None:
    assert repeated_share(ids, n) == pytest.approx(expected)


def test_repetition_counts_what_was_said_and_not_its_end() -> None:
    """Row 2 is abcdabcd: 7 pairs of which ab, bc, cd came before. Row 0 becomes a a a a a EOS: 4 pairs, 3 repeated."""
    r = rollout()
    ids = r.response_ids.clone()
    ids[0, :5] = 9
    assert scores("repetition,n=2", replace(r, response_ids=ids)) == pytest.approx([-3 / 4, 0.0, -3 / 7])
    ids[0, :5] = tiny.EOS  # a cut response may hold the id too, where EOS is an ordinary token of the template
    cut = replace(r, response_ids=ids, ended=torch.zeros(3, dtype=torch.bool))
    assert scores("repetition,n=1", cut)[:2] == pytest.approx([-5 / 6, 0.0])
