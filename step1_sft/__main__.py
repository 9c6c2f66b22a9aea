"""`python -m step1_sft`: run supervised fine-tuning by itself."""

from collections.abc import Sequence

from rlhf.errors import run_program
from rlhf.training.stage_process import fast_imports, stage_main
from step1_sft.config import STAGE, SFTConfig


def main(argv: Sequence[str] | None = None, program: str = "") -> int:
    def run(options: SFTConfig) -> None:
        with fast_imports():  # imported here because they import torch
            from rlhf.plan.command import resolve_standalone
            from step1_sft.stage import FINE_TUNING

        FINE_TUNING.run(resolve_standalone(options, FINE_TUNING))

    return stage_main(argv, STAGE, lambda _: SFTConfig, run, program)


if __name__ == "__main__":
    run_program(main)
