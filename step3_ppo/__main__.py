"""`python -m step3_ppo`: reinforcement learning alone."""

import sys

from rlhf import config, plugins
from rlhf.run import stage_main
from step3_ppo.config import Step3Config


def main() -> int:
    def run(options: Step3Config) -> None:
        from step3_ppo import stage

        stage.run(options)

    def options_of_the_algorithm() -> type[Step3Config]:
        name = config.peek(sys.argv[1:], "algorithm", "ppo")
        return plugins.find("step3_ppo.algorithms", name).Config

    return stage_main(options_of_the_algorithm, "step3_ppo", "Reinforcement learning from scores.", run)


if __name__ == "__main__":
    raise SystemExit(main())
