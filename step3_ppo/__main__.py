"""`python -m step3_ppo`: reinforcement learning alone."""

from rlhf.config import parser
from rlhf.launch.launcher import stage_main
from step3_ppo.config import Step3Config

GROUPS = {
    "reinforcement learning": (
        "actor-model", "reward-model", "algorithm", "reward", "judge", "response-length", "total-episodes",
        "batch-size", "kl-coef", "learning-rate", "critic-learning-rate", "eval-every",
    ),
}  # fmt: skip


def main() -> int:
    def run(options: Step3Config) -> None:
        from rlhf.plan.command import settle_alone
        from step3_ppo import plan, stage

        stage.run(settle_alone(options, plan.needs))

    def options_of_the_algorithm(argv: list[str]) -> type[Step3Config]:
        from step3_ppo import algorithms  # here, as it imports torch

        return algorithms.options(parser.peek(argv, "algorithm", "ppo"))

    return stage_main(options_of_the_algorithm, "step3_ppo", "Reinforcement learning from scores.", GROUPS, run)


if __name__ == "__main__":
    raise SystemExit(main())
