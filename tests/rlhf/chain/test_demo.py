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


def from_models(directory: Path, output: Path, *words: str) -> dict[str, float]:
    """Step 3 of the demo from the models of another run; its numbers."""
    start = ("--ppo.actor-model", f"{directory}/step1_sft", "--ppo.reward-model", f"{directory}/step2_reward")
    train("--config", DEMO, *start, "--steps", "3", "--output-dir", str(output), *words)
    numbers: dict[str, float] = json.loads((output / "step3_ppo/manifest.json").read_text(encoding="utf-8"))["metrics"]
    return numbers


@pytest.mark.long
def test_a_short_run_with_a_budget_is_as_good_as_the_tuned_coefficient(tmp_path: Path) -> None:
    """Five seeds of half the demo. At equal KL: near the start a score rises with the root of the KL. With a lower
    curve of the travel in place of its square the coefficient fell to 0.02 and the KL rose by noise: 0.92 of the
    constant one's judge in the mean, and up to 1.95 nats of 1.5."""
    shares, kls = [], []
    for seed in range(5):
        run = tmp_path / f"{seed}"
        train("--config", DEMO, "--steps", "1", "2", "--seed", str(seed), "--output-dir", str(run))
        short = ("--seed", str(seed), "--ppo.total-episodes", "2560")
        constant, budget = (
            from_models(run, run / name, *short, *words)
            for name, words in (("constant", ()), ("budget", ("--ppo.kl-budget", "1.5")))
        )
        gains = [(x["eval_judge"] - x["eval_judge_before"]) / x["eval_kl"] ** 0.5 for x in (budget, constant)]
        shares.append(gains[0] / gains[1])
        kls.append(budget["eval_kl"])
    assert sum(shares) / 5 > 0.96, shares
    assert max(kls) < 1.2 * 1.5 and min(kls) > 0.6 * 1.5, kls


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's SFT and reward model of seed 1."""
    directory = tmp_path_factory.mktemp("models")
    train("--config", DEMO, "--steps", "1", "2", "--seed", "1", "--output-dir", str(directory))
    return directory


@pytest.mark.long
@pytest.mark.parametrize("algorithm", sorted(path.stem for path in (ROOT / "configs/algorithms").glob("*.yaml")))
def test_every_other_algorithm_improves_the_true_score(algorithm: str, models: Path, tmp_path: Path) -> None:
    metrics = from_models(models, tmp_path, "--config", f"configs/algorithms/{algorithm}.yaml", "--seed", "1")
    stage = tmp_path / "step3_ppo"
    assert metrics["eval_judge"] - metrics["eval_judge_before"] - metrics["eval_judge_gain_ci95"] > 0
    assert 0 < metrics["eval_kl"] < 6
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("first_ratio_std", "first_approx_kl"):  # the first minibatch is on policy, in fp32
        assert max(abs(row[name]) for row in rows if name in row) < 1e-5
