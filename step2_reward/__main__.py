"""`python -m step2_reward`: the reward model by itself."""

import os
from collections.abc import Sequence

from rlhf.errors import run_program
from rlhf.launch.supervisor import LAUNCHER
from rlhf.training.stage_process import fast_imports, stage_main
from step2_reward.config import STAGE, RewardConfig


def main(argv: Sequence[str] | None = None, program: str = "") -> int:
    """What a user types: a chain of this step. program: what stands before the options"""
    from rlhf.chain import alone  # imported here because its processes need none of it

    return alone.run(2, lambda _: RewardConfig, argv, program)


def process(argv: Sequence[str] | None = None) -> int:
    """A process of the stage, which a chain starts."""

    def run(options: RewardConfig) -> None:
        with fast_imports():  # imported here because it imports torch
            from step2_reward.stage import REWARD_MODELLING

        REWARD_MODELLING.run(options)

    return stage_main(argv, STAGE, lambda _: RewardConfig, run)


if __name__ == "__main__":
    run_program(process if LAUNCHER in os.environ else main)
