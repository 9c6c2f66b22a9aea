"""Several sources as one score: weights, the sum and the minimum, the names they are logged by."""

from pathlib import Path

import pytest
import torch

from rlhf import plugins, rewards
from rlhf.errors import UserError
from rlhf.rewards import Sources, WeightedSource, open_sources
from tests.rlhf.rewards.responses import context, reward_model, rollout, samples, tiny

FUNCTIONS = """
def ups(prompts, responses): return [1.0, 2.0, 3.0]
def downs(prompts, responses): return [5.0, -1.0, 2.5]
def huge(prompts, responses): return [1.0, 3e38, 1.0]
def bad(prompts, responses): return [1.0, float('nan'), 1.0]
score = ups
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return f"{tmp_path}/mine.py"


def test_a_weighted_sum(mine: str, tmp_path: Path) -> None:
    """0.5 * (1, 2, 3) - 2 * (5, -1, 2.5)"""
    scores, each = open_sources([f"0.5*{mine}:ups", f"-2*{mine}:downs"], context(tmp_path))(samples(rollout()))
    assert scores.tolist() == [-9.5, 3.0, -3.5]
    assert {name: values.tolist() for name, values in each.items()} == {
        "mine.py:ups": [1.0, 2.0, 3.0],
        "mine.py:downs": [5.0, -1.0, 2.5],
    }


def test_the_minimum_of_what_is_weighted(mine: str, tmp_path: Path) -> None:
    """(1, 2, 3) against 0.5 * (5, -1, 2.5)"""
    scores, _ = open_sources([f"{mine}:ups", f"0.5*{mine}:downs"], context(tmp_path), "min")(samples(rollout()))
    assert scores.tolist() == [1.0, -0.5, 1.25]


def test_members_that_disagree_score_less(mine: str, tmp_path: Path) -> None:
    """By hand: members (1, 2, 3) and 2 * (5, -1, 2.5) have means (5.5, 0, 4) and deviations (4.5, 2, 1)."""
    specs = [mine, f"0*{mine}:huge", f"2*{mine}:downs"]
    sources = open_sources(specs, context(tmp_path), "uncertain", uncertainty_coef=0.5)
    scores, each = sources(samples(rollout()))
    assert scores.tolist() == [5.5 - 10.125, 0.0 - 2.0, 4.0 - 0.5]
    disagreement = sources.disagreement(torch.stack(list(each.values()), dim=1))
    assert disagreement is not None and disagreement.tolist() == [4.5, 2.0, 1.0]
    assert open_sources(specs, context(tmp_path), "sum").disagreement(torch.ones(3, 3)) is None
    with pytest.raises(UserError, match="uncertain: got 1 source, expected the members of an ensemble"):
        open_sources(specs[:2], context(tmp_path), "uncertain")


def test_normalized_sources_count_alike_whatever_their_scale() -> None:
    """By hand, in groups of two: (1, 3) and (0, 100) each deviate by half their distance over sqrt(1/2); where one
    source has no score for a response, the other decides, and a group of one score teaches nothing of it."""
    sources = Sources((WeightedSource("a", 1.0, len), WeightedSource("b", 0.5, len)), "normalized")  # type: ignore[arg-type]
    scores = torch.tensor([[1.0, 0.0], [3.0, 100.0], [2.0, rewards.NO_SCORE], [6.0, 7.0], [5.0, 5.0], [5.0, 5.0]])
    half = 0.5**0.5
    expected = [-1.5 * half, 1.5 * half, -half, half, 0, 0]
    assert sources.normalized(scores, 2).tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("combine", "expected"), [("sum", [1.0, 2.0, 3.0]), ("min", [1.0, 2.0, 3.0])])
def test_a_weight_of_0_watches_and_counts_for_nothing(
    combine: rewards.Combine, expected: list[float], mine: str, tmp_path: Path
) -> None:
    scores, each = open_sources([mine, f"0*{mine}:downs"], context(tmp_path), combine)(samples(rollout()))
    assert scores.tolist() == expected and each["mine.py:downs"].tolist() == [5.0, -1.0, 2.5]


def test_names_are_short_and_numbered_where_they_come_twice(mine: str, tmp_path: Path) -> None:
    specs = [mine, f"{mine}:ups", "length,target=1", "2*length,target=2", "repetition", f"python,function={mine}:downs"]
    sources = open_sources(specs, context(tmp_path))
    assert sources.names == ("mine.py", "mine.py:ups", "length#1", "length#2", "repetition", "mine.py:downs")
    assert tuple(sources(samples(rollout()))[1]) == sources.names


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("learned", (1.0, "learned")),
        ("0.7*learned", (0.7, "learned")),
        ("-.5 * length,target=4", (-0.5, "length,target=4")),
        ("1e-2*a/b.py:f", (0.01, "a/b.py:f")),
        (r"match,pattern=a\s*b", (1.0, r"match,pattern=a\s*b")),
        (r"2*match,pattern=a*", (2.0, r"match,pattern=a*")),
    ],
)
def test_how_a_weight_is_written(spec: str, expected: tuple[float, str]) -> None:
    assert plugins.split_weight(spec) == expected


def test_what_is_not_finite_is_passed_on(mine: str, tmp_path: Path) -> None:
    """Step 3 leaves such an iteration out, on every rank; a source that counts for nothing does not matter."""
    bad, _ = open_sources(["repetition", f"{mine}:bad"], context(tmp_path))(samples(rollout()))
    assert not torch.isfinite(bad).all()
    huge, _ = open_sources(["repetition", f"10*{mine}:huge"], context(tmp_path))(samples(rollout()))
    assert torch.isinf(huge).any()
    fine, each = open_sources(["repetition", f"0*{mine}:bad"], context(tmp_path))(samples(rollout()))
    assert torch.isfinite(fine).all() and not torch.isfinite(each["mine.py:bad"]).all()


def test_a_constant_between_members_counts_for_nothing() -> None:
    """Two members that always agree, 10 apart, of which one has the weight 2 and half the scores."""
    score = torch.tensor([1.0, -2.0, 4.0])
    one = WeightedSource("one", 1.0, lambda _: score, offset=0.5)
    other = WeightedSource("other", 2.0, lambda _: score / 2 + 10, offset=10.25)
    sources = Sources((one, other), "uncertain", uncertainty_coef=0.5)
    scores, each = sources(samples(rollout()))
    assert scores.tolist() == [0.5, -2.5, 3.5] and each["other"].tolist() == [10.5, 9.0, 12.0]
    disagreement = sources.disagreement(torch.stack(list(each.values()), dim=1))
    assert disagreement is not None and disagreement.tolist() == [0.0, 0.0, 0.0]


def test_a_reward_model_in_an_ensemble_starts_from_its_held_out_mean(mine: str, tmp_path: Path) -> None:
    reward_model(tmp_path, tiny.tokenizer(), score_mean=1.5, score_std=2.0)
    specs = ["learned", "learned,normalize=true", f"{mine}:ups"]
    cases: dict[rewards.Combine, list[float]] = {"uncertain": [1.5, 0.0, 0.0], "sum": [0.0] * 3, "min": [0.0] * 3}
    for combine, expected in cases.items():
        assert [each.offset for each in open_sources(specs, context(tmp_path), combine).sources] == expected
    reward_model(tmp_path, tiny.tokenizer())
    assert open_sources(specs[::2], context(tmp_path), "uncertain").sources[0].offset == 0.0
