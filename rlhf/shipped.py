"""Where the project's own files are: in a checkout, and in an environment that a wheel was installed into."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""the directory that holds the packages rlhf, data and those of the three stages"""
PACKAGES = ("rlhf", "data", "step1_sft", "step2_reward", "step3_ppo")
INSTALLED = Path(__file__).parent / "configs"
CONFIGS = INSTALLED if INSTALLED.is_dir() else ROOT / "configs"
"""recipes, presets of models, shapes of well-known models"""


def config_file(path: str | Path) -> Path:
    """The file that `path` names. One under configs/ that is not there is the shipped one: `--config
    configs/overlays/lora.yaml` means the same in a checkout and with an installed wheel in any directory."""
    path = Path(path)
    own = CONFIGS.parent / path
    return own if path.parts[:1] == (CONFIGS.name,) and not path.exists() and own.is_file() else path
