"""The demo: options that make it as small as all three stages still run on it, and what a finished demo must reach."""

import json
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "data_path": ["demo,rows=400"],
    "chat_template": "human_assistant",
    "dtype": "fp32",
    "batch_size": 32,
    "micro_batch_size": 32,
    "max_prompt_length": 24,
    "max_length": 48,
    "max_eval_rows": 8,
    "sample_rows": 0,
}


def require_better_policy(out: Path) -> None:
    """Reward model and policy of a finished demo are better, the policy by half of what it could gain."""

    def metrics(stage: str) -> dict[str, float]:
        numbers: dict[str, float] = json.loads((out / stage / "manifest.json").read_text())["metrics"]
        return numbers

    assert metrics("step2_reward")["eval_accuracy"] >= 0.9
    ppo = metrics("step3_ppo")
    best = 1.0  # what the world's true score gives three kind adjectives
    assert ppo["eval_judge"] - ppo["eval_judge_before"] >= 0.5 * (best - ppo["eval_judge_before"])
    # Kind adjectives alone cost 3 ln 3 = 3.3 nats; the rest is room for which of them.
    assert 0 < ppo["eval_kl"] < 6
