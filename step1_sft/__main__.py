"""`python -m step1_sft`: supervised fine-tuning alone."""

from rlhf.launch.launcher import stage_main
from step1_sft.config import SFTConfig

GROUPS = {"fine-tuning": ("model", "num-train-epochs", "batch-size", "learning-rate", "objective", "loss-on")}


def main() -> int:
    def run(options: SFTConfig) -> None:
        from rlhf.plan.command import settle_alone
        from step1_sft import plan, stage

        stage.run(settle_alone(options, plan.needs))

    return stage_main(lambda argv: SFTConfig, "step1_sft", "Supervised fine-tuning on responses.", GROUPS, run)


if __name__ == "__main__":
    raise SystemExit(main())
