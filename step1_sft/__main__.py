"""`python -m step1_sft`: supervised fine-tuning by itself."""

import os
from collections.abc import Sequence

from rlhf.errors import run_program
from rlhf.launch.supervisor import LAUNCHER
from rlhf.training.stage_process import fast_imports, stage_main
from step1_sft.config import STAGE, SFTConfig


def main(argv: Sequence[str] | None = None, program: str = "") -> int:
    """What a user types: a chain of this step. program: what stands before the options"""
    from rlhf.chain import alone  # imported here because its processes need none of it

    return alone.run(1, lambda _: SFTConfig, argv, program)


def process(argv: Sequence[str] | None = None) -> int:
    """A process of the stage, which a chain starts."""

    def run(options: SFTConfig) -> None:
        with fast_imports():  # imported here because it imports torch
            from step1_sft.stage import FINE_TUNING

        FINE_TUNING.run(options)

    return stage_main(argv, STAGE, lambda _: SFTConfig, run)


if __name__ == "__main__":
    run_program(process if LAUNCHER in os.environ else main)
