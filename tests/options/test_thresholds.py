"""Steps that are not finite end a run after as many as the option says; and seeds, which only shuffle."""

from pathlib import Path
from typing import Any

import pytest

from tests.options import cases, harness

EXPLODING: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "learning_rate": 1e30}
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


def test_another_seed_is_another_order(folder: Path) -> None:
    stage = "step1_sft"
    orders = [
        [[row for micro in micros for row in micro] for _, micros in harness.run(stage, config).batches]
        for config in (cases.config_of(folder, stage, seed=seed) for seed in (3, 3, 4))
    ]
    assert orders[0] == orders[1] != orders[2]
