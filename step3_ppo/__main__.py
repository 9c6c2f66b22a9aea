"""`python -m step3_ppo`: run reinforcement learning by itself."""

from collections.abc import Sequence

from rlhf.config import parser
from rlhf.errors import run_program
from rlhf.training.stage_process import fast_imports, stage_main
from step3_ppo.config import STAGE, Step3Config


def main(argv: Sequence[str] | None = None, program: str = "") -> int:
    def run(options: Step3Config) -> None:
        with fast_imports():  # imported here because they import torch
            from rlhf.plan.command import resolve_standalone
            from step3_ppo import stage

        stage.run(resolve_standalone(options, stage.REINFORCEMENT))

    def options_of_the_algorithm(argv: list[str]) -> type[Step3Config]:
        with fast_imports():
            from step3_ppo import algorithms  # imported here because it imports torch

        return algorithms.options(parser.peek(argv, "algorithm", "ppo"))

    return stage_main(argv, STAGE, options_of_the_algorithm, run, program)


if __name__ == "__main__":
    run_program(main)
