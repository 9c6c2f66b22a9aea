"""A stage from its Config to its end, in memory: what it trained on, its metrics, and what its weights became.

The stage's own `run` is called, in this process or on every rank. What it would keep on disk is kept here, and what
passes through sampling and through optimizer steps is noted.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from torch import Tensor

from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.models import load
from rlhf.training import run as stage_run
from rlhf.training import stage_process
from rlhf.training.run import Run
from rlhf.types import Metrics, SampledRollout
from step1_sft.stage import FINE_TUNING as sft
from step2_reward.stage import REWARD_MODELLING as reward
from step3_ppo import learner
from step3_ppo import stage as ppo

STAGES: dict[str, Any] = {"step1_sft": sft, "step2_reward": reward, "step3_ppo": ppo}
Ids = tuple[int, ...]


@dataclass
class Observed:
    """A run of all ranks together."""

    metrics: list[Metrics] = field(default_factory=list)
    """of each optimizer step, or iteration"""
    final: Metrics = field(default_factory=dict)
    """of the whole run"""
    error: str = ""
    """why it ended early"""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """fp32, by engine and name; `ema` is one of the engines"""
    rollouts: list[list[tuple[Ids, Ids, bool]]] = field(default_factory=list)
    """of each rollout the rows: prompt, response, whether it ended"""
    batches: list[tuple[str, list[list[Any]]]] = field(default_factory=list)
    """of each optimizer step the engine's title, and the rows of every micro-batch: ids, or a pair of them"""
    best: list[int] = field(default_factory=list)
    """after how many iterations a policy was saved as the best"""
    ranks: int = 1


class InMemory(Run):
    """A run that writes no models and no checkpoints."""

    def __init__(self, observed: Observed, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._observed = observed

    def run_loop(self, steps: Iterable[Metrics], *_: Any, **__: Any) -> None:
        self._observed.metrics += steps

    def save(self, folder: str, save: Callable[[Path], None]) -> None:
        self._observed.best.append(len(self._observed.metrics))

    def finish(self, models: Mapping[str, Any], metrics: Metrics, state: Any = None) -> None:
        self._observed.final = metrics
        for title, engine in self._state.tensors.items():
            mine = engine.fp32_weights() if isinstance(engine, Engine) else engine.tensors()
            for share in collectives.gather_objects({f"{title}.{name}": weight.clone() for name, weight in mine}):
                self._observed.weights |= share


def run(stage: str, config: Any) -> Observed:
    """The stage's own `run` of this config, in the process group there is; every rank calls it together."""
    observed = Observed(ranks=collectives.world_size())

    def give_up(message: str, code: int) -> NoReturn:
        raise SystemExit(message)

    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (collectives, "process_group", lambda timeout_s: contextlib.nullcontext()),
            (stage_process, "give_up", give_up),
            (stage_run, "Run", functools.partial(InMemory, observed)),
            (load, "_load", read_once(load._load)),
            (Engine, "step", noting_batches(observed)),
            (learner, "generate", noting_rollouts(observed)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        try:
            STAGES[stage].run(config)
        except SystemExit as end:
            observed.error = str(end)
    return joined(observed)


def joined(observed: Observed) -> Observed:
    """With the rows of all ranks."""
    shares = collectives.gather_objects((observed.rollouts, observed.batches))
    rollouts = [[row for part in parts for row in part] for parts in zip(*(share[0] for share in shares), strict=True)]
    batches = [
        (parts[0][0], [rows for _, micros in parts for rows in micros])
        for parts in zip(*(share[1] for share in shares), strict=True)
    ]
    return replace(observed, rollouts=rollouts, batches=batches)


@functools.cache
def read_once(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """Half of the seconds of a short run are the reading of the same four models."""
    known: dict[str, Any] = {}

    def load_model_again(*arguments: Any) -> Any:
        if arguments[-1].shards is not None:  # a copy would have no parts
            return load_model(*arguments)
        key = repr(arguments)
        if key not in known:
            known[key] = load_model(*arguments)
        return copy.deepcopy(known[key])

    return load_model_again


def noting_batches(observed: Observed) -> Callable[..., Metrics]:
    step = Engine.step

    def noted(self: Engine, micro_batches: Any, *arguments: Any) -> Metrics:
        micros = list(micro_batches)
        rows = [rows_of(getattr(micro, "rollout", micro)) for micro in micros]
        observed.batches.append((self._title, rows))
        return step(self, micros, *arguments)

    return noted


def noting_rollouts(observed: Observed) -> Callable[..., SampledRollout]:
    generate = learner.generate

    def noted(*arguments: Any) -> SampledRollout:
        rollout = generate(*arguments)
        ended = rollout.ended.tolist()
        observed.rollouts.append([(*row, end) for row, end in zip(rows_of(rollout), ended, strict=True)])
        return rollout

    return noted


def rows_of(rows: Any) -> list[Any]:
    """The tokens of each row; of a rollout (prompt, response), of pairs (chosen, rejected)."""
    if isinstance(rows, SampledRollout):
        sides = [(rows.prompt_ids, rows.prompt_mask), (rows.response_ids, rows.mask)]
    elif hasattr(rows, "chosen"):
        sides = [(side.ids, side.mask) for side in (rows.chosen, rows.rejected)]
    else:
        return [tuple(ids[mask].tolist()) for ids, mask in zip(rows.ids, rows.mask, strict=True)]
    each = [[tuple(row[real].tolist()) for row, real in zip(*side, strict=True)] for side in sides]
    return list(zip(*each, strict=True))
