"""What pyproject.toml cannot say: configs/ of a checkout is the package rlhf.configs of a wheel, and docs/ is
rlhf.docs, of which a wheel has the page that the report quotes."""

from setuptools import find_packages, setup

OURS = ("rlhf", "data", "step1_sft", "step2_reward", "step3_ppo")

setup(
    packages=[
        *find_packages(include=[pattern for name in OURS for pattern in (name, f"{name}.*")]),
        "rlhf.configs",
        "rlhf.docs",
    ],
    package_dir={"rlhf.configs": "configs", "rlhf.docs": "docs"},
)
