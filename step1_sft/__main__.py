"""`python -m step1_sft`: supervised fine-tuning alone."""

from rlhf.launch import stage_main
from step1_sft.config import SFTConfig


def main() -> int:
    def run(options: SFTConfig) -> None:
        from step1_sft import stage

        stage.run(options)

    return stage_main(lambda argv: SFTConfig, "step1_sft", "Supervised fine-tuning on responses.", run)


if __name__ == "__main__":
    raise SystemExit(main())
