"""Workloads of stages, whose earlier stages start from named models."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rlhf.config.options import EngineOptions
from rlhf.plan.command import WorkloadOf
from rlhf.plan.forecast import Workload
from rlhf.plan.sizes import local_tokenizer
from rlhf.roles import Planned, Role
from step3_ppo.config import MAKERS
from step3_ppo.roles import ACTOR


def planned(paths: Mapping[str, str]) -> Planned:
    """The roles that earlier stages train, from the path that each starts from, by option of step 3."""
    return {MAKERS[option]: Role(ACTOR, path, EngineOptions()) for option, path in paths.items()}


def workload_of(stage: Any, config: Any, device: str, paths: Mapping[str, str]) -> Workload:
    """As in a plan. paths: what earlier stages start from, by option of step 3"""
    work: Workload = stage.workload(stage.roles(config, planned(paths), local_tokenizer), config, device)
    return work


def bound(stage: Any, config: Any) -> WorkloadOf:
    """The workload with the models of these options, for other settings of them."""
    return partial(stage.workload, stage.roles(config, {}, local_tokenizer))
