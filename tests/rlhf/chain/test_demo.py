"""The demo does what it says: reward model and policy do better by a score that nobody trained on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import algorithms
from tests.support.demo import require_better_policy

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_ppo_closes_half_the_gap_to_the_best_true_score(seed: int, tmp_path: Path) -> None:
    """Of shorter runs, each stage does better in tests/docs/test_tutorial.py."""
    command = [sys.executable, "train.py", "--seed", str(seed), "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    require_better_policy(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's SFT and reward model of seed 1."""
    directory = tmp_path_factory.mktemp("models")
    algorithms.make_models(directory, seed=1)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [name for name in algorithms.Options().algorithms if name != "ppo"])
def test_every_other_algorithm_improves_the_true_score(algorithm: str, models: Path, tmp_path: Path) -> None:
    result = algorithms.run(algorithm, 1, models, tmp_path)
    assert result.gain - result.gain_ci95 > 0
    assert 0 < result.kl < 6
    assert max(result.first_ratio_std, result.first_approx_kl) < algorithms.RATIO_LIMIT
