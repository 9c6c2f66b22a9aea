"""`python -m step1_sft`: supervised fine-tuning alone."""

from rlhf.run import stage_main
from step1_sft.config import SFTConfig


def main() -> int:
    def run(config: SFTConfig) -> None:
        from step1_sft import stage

        stage.run(config)

    return stage_main(lambda: SFTConfig, "step1_sft", "Supervised fine-tuning on responses.", run)


if __name__ == "__main__":
    raise SystemExit(main())
