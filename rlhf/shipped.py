"""Where the project's own files are: in a checkout, and in an environment that a wheel was installed into."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""the directory that holds the packages rlhf, data and those of the three stages"""
INSTALLED = Path(__file__).parent / "configs"
CONFIGS = INSTALLED if INSTALLED.is_dir() else ROOT / "configs"
"""recipes, presets of models, shapes of well-known models"""
