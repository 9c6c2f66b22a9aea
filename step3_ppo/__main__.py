"""`python -m step3_ppo`: reinforcement learning by itself."""

import os
from collections.abc import Sequence

from rlhf.config import parser
from rlhf.errors import run_program
from rlhf.launch.supervisor import LAUNCHER
from rlhf.training.stage_process import fast_imports, stage_main
from step3_ppo import algorithm_options
from step3_ppo.config import STAGE, Step3Config


def main(argv: Sequence[str] | None = None, program: str = "") -> int:
    """What a user types: a chain of this step. program: what stands before the options"""
    from rlhf.chain import alone  # imported here because its processes need none of it

    return alone.run(3, options_of_the_algorithm, argv, program)


def process(argv: Sequence[str] | None = None) -> int:
    """A process of the stage, which a chain starts."""

    def run(options: Step3Config) -> None:
        with fast_imports():  # imported here because it imports torch
            from step3_ppo import stage

        stage.run(options)

    return stage_main(argv, STAGE, options_of_the_algorithm, run)


def options_of_the_algorithm(argv: list[str]) -> type[Step3Config]:
    """The class of the options of the algorithm that a command line names."""
    return algorithm_options.options(parser.peek(argv, "algorithm", "ppo"))


if __name__ == "__main__":
    run_program(process if LAUNCHER in os.environ else main)
