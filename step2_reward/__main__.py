"""`python -m step2_reward`: train the reward model by itself."""

from collections.abc import Sequence

from rlhf.errors import run_program
from rlhf.training.stage_process import fast_imports, stage_main
from step2_reward.config import STAGE, RewardConfig


def main(argv: Sequence[str] | None = None, program: str = "") -> int:
    def run(options: RewardConfig) -> None:
        with fast_imports():  # imported here because they import torch
            from rlhf.plan.command import resolve_standalone
            from step2_reward.stage import REWARD_MODELLING

        REWARD_MODELLING.run(resolve_standalone(options, REWARD_MODELLING))

    return stage_main(argv, STAGE, lambda _: RewardConfig, run, program)


if __name__ == "__main__":
    run_program(main)
