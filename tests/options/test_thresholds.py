"""Options that end something: at which step, to a thousandth of the threshold; and seeds, which only shuffle."""

from pathlib import Path
from typing import Any

import pytest

from tests.options import cases, harness
from tests.options.comparison import Comparison
from tests.options.prediction import reinforcement

STEADY: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}
EXPLODING: dict[str, Any] = {**STEADY, "learning_rate": 1e30}
CASES: list[tuple[str, str, dict[str, Any], str, int]] = [
    ("step1_sft", "", {"num_train_epochs": 4, "eval_every": "4epochs"}, "step", 2),
    ("step1_sft", "", {"num_train_epochs": 4, "eval_every": "4epochs"}, "step", 4),
    ("step2_reward", "", {"num_train_epochs": 4, "eval_every": "4epochs"}, "step", 4),
    ("step3_ppo", "ppo", {"num_ppo_epochs": 9}, "actor step", 2),
    ("step3_ppo", "ppo", {"num_ppo_epochs": 9, "critic_learning_rate": 1e30, "learning_rate": 1e-4}, "critic step", 4),
    ("step3_ppo", "ppo", {"num_ppo_epochs": 1, "total_episodes": 64}, "iteration", 2),
]


@pytest.mark.parametrize(("stage", "algorithm", "changes", "title", "limit"), CASES)
def test_max_bad_steps(
    stage: str, algorithm: str, changes: dict[str, Any], title: str, limit: int, folder: Path
) -> None:
    """The first step makes weights of 1e30, and no number after it is finite."""
    config = cases.config_of(folder, stage, algorithm, **EXPLODING | changes, max_bad_steps=limit)
    error = harness.run(stage, config).error
    assert error.startswith(f"error: {stage}: {title} {1 + limit}: ") and f", {limit} times in a row; " in error


@pytest.mark.parametrize(("option", "epochs"), [("target_kl", 4), ("abort_kl", 1)])
def test_a_kl_at_its_threshold(option: str, epochs: int, folder: Path) -> None:
    """The largest KL of a run, and a thousandth more or less."""

    def run(**changes: Any) -> harness.Observed:
        changes = (
            STEADY | {"num_ppo_epochs": epochs, "total_episodes": 32 // epochs, "abort_kl_iterations": 1} | changes
        )
        config = cases.config_of(folder, "step3_ppo", "ppo", **changes)
        observed = harness.run("step3_ppo", config)
        predicted = reinforcement(config, Comparison(observed))
        predicted.run()
        kls.append(predicted.approx_kls if option == "target_kl" else [step["kl"] for step in observed.metrics])
        return observed

    kls: list[list[float]] = []
    run()
    largest = max(kls[0])
    at = kls[0].index(largest) + 1
    assert at > 1 and sorted(kls[0])[-2] < 0.99 * largest
    run(**{option: largest * 0.999})
    run(**{option: largest * 1.001})
    assert [len(steps) for steps in kls] == [4, at, 4]


def test_another_seed_is_another_order(folder: Path) -> None:
    stage = "step1_sft"
    orders = [
        [[row for micro in micros for row in micro] for _, micros in harness.run(stage, config).batches]
        for config in (cases.config_of(folder, stage, seed=seed) for seed in (3, 3, 4))
    ]
    assert orders[0] == orders[1] != orders[2]
