"""The demo does what it says: reward model and policy do better by a score that nobody trained on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.demo import require_better_policy

ROOT = Path(__file__).parents[3]
DEMO = "configs/demo.yaml"


def train(*words: str) -> None:
    command = [sys.executable, "train.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_ppo_closes_half_the_gap_to_the_best_true_score(seed: int, tmp_path: Path) -> None:
    """Of shorter runs, each stage does better in tests/docs/test_tutorial.py."""
    train("--seed", str(seed), "--output-dir", str(tmp_path))
    require_better_policy(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's SFT and reward model of seed 1."""
    directory = tmp_path_factory.mktemp("models")
    train("--config", DEMO, "--steps", "1", "2", "--seed", "1", "--output-dir", str(directory))
    return directory


@pytest.mark.long
@pytest.mark.parametrize("algorithm", sorted(path.stem for path in (ROOT / "configs/algorithms").glob("*.yaml")))
def test_every_other_algorithm_improves_the_true_score(algorithm: str, models: Path, tmp_path: Path) -> None:
    start = ("--ppo.actor-model", f"{models}/step1_sft", "--ppo.reward-model", f"{models}/step2_reward")
    changed = ("--config", DEMO, f"configs/algorithms/{algorithm}.yaml", "--steps", "3", "--seed", "1")
    train(*changed, "--output-dir", str(tmp_path), *start)
    stage = tmp_path / "step3_ppo"
    metrics = json.loads((stage / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics["eval_judge"] - metrics["eval_judge_before"] - metrics["eval_judge_gain_ci95"] > 0
    assert 0 < metrics["eval_kl"] < 6
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("first_ratio_std", "first_approx_kl"):  # the first minibatch is on policy, in fp32
        assert max(abs(row[name]) for row in rows if name in row) < 1e-5
