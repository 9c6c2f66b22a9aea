"""`python -m step1_sft`: supervised fine-tuning alone."""

from rlhf.launch.launcher import stage_main
from step1_sft.config import STAGE, SFTConfig


def main() -> int:
    def run(options: SFTConfig) -> None:
        from rlhf.plan.command import settle_alone  # here, as it imports torch
        from step1_sft.stage import FINE_TUNING

        FINE_TUNING.run(settle_alone(options, FINE_TUNING.needs))

    return stage_main(lambda argv: SFTConfig, STAGE.name, STAGE.title, STAGE.help_groups, run)


if __name__ == "__main__":
    raise SystemExit(main())
