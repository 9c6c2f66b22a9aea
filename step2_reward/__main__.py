"""`python -m step2_reward`: the reward model alone."""

from rlhf.launch.launcher import stage_main
from step2_reward.config import RewardConfig

GROUPS = {"the reward model": ("model", "num-train-epochs", "batch-size", "learning-rate", "centering")}


def main() -> int:
    def run(options: RewardConfig) -> None:
        from rlhf.plan.command import settle_alone
        from step2_reward import plan, stage

        stage.run(settle_alone(options, plan.needs))

    return stage_main(lambda argv: RewardConfig, "step2_reward", "A pairwise reward model on preferences.", GROUPS, run)


if __name__ == "__main__":
    raise SystemExit(main())
