"""The paths of the project's own files, in a checkout and in an environment with the installed wheel."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""the directory that holds the packages rlhf, data and those of the three stages"""
PACKAGES = ("rlhf", "data", "step1_sft", "step2_reward", "step3_ppo")
INSTALLED = Path(__file__).parent / "configs"
CONFIGS = INSTALLED if INSTALLED.is_dir() else ROOT / "configs"
"""recipes, presets of models, shapes of well-known models"""
INSTALLED_DOCS = Path(__file__).parent / "docs"
METRICS_PAGE = (INSTALLED_DOCS if INSTALLED_DOCS.is_dir() else ROOT / "docs") / "metrics.md"
"""what the numbers mean: a page of the documentation, and the tables that the report quotes"""


def config_file(path: str | Path) -> Path:
    """The file at `path`; if it is under configs/ and does not exist, the file that the project ships there.

    So `--config configs/overlays/lora.yaml` works in a checkout, and with an installed wheel in any directory.
    """
    path = Path(path)
    shipped = CONFIGS.parent / path
    return shipped if path.parts[:1] == (CONFIGS.name,) and not path.exists() and shipped.is_file() else path
