"""The stages in the process of the test, which takes no seconds for the libraries."""

from collections.abc import Callable
from typing import Any

from step1_sft.stage import FINE_TUNING
from step2_reward.stage import REWARD_MODELLING
from step3_ppo import stage as ppo

RUNS: dict[int, Callable[[Any], None]] = {1: FINE_TUNING.run, 2: REWARD_MODELLING.run, 3: ppo.run}


def run_stage(step: int, options: Any, _: object) -> int:
    """In place of `rlhf.chain.command.run_stage`."""
    RUNS[step](options)
    return 0
