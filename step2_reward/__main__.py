"""`python -m step2_reward`: the reward model alone."""

from rlhf.run import stage_main
from step2_reward.config import RewardConfig


def main() -> int:
    def run(config: RewardConfig) -> None:
        from step2_reward import stage

        stage.run(config)

    return stage_main(lambda: RewardConfig, "step2_reward", "A pairwise reward model on preferences.", run)


if __name__ == "__main__":
    raise SystemExit(main())
