"""One objective of the reward model a file: `Config`, its options; and `build(config)`, an `Objective`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rlhf import plugins
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.maths.losses import Loss
from rlhf.storage import manifests
from rlhf.types import Sequences
from step2_reward.config import RewardConfig

FOLDER = __name__


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """The B pairs of one micro-batch. Only the scores have a gradient."""

    chosen: Tensor
    """[B], scores of the preferred responses"""
    rejected: Tensor
    """[B], scores of the others"""
    weight: Tensor
    """[B], weight of the row / number of pairs of the same ranked list; 0: the pair does not count"""
    margin: Tensor | None = None
    """[B], how much better the chosen side is, if the data has it"""
    sides: Sequences | None = None
    """[2 B, S], with `every_token`: the tokens of both sides, the chosen ones first"""
    scalars: Tensor | None = None
    """[2 B, S], with `every_token`: the score at each token of `sides`"""


class Objective(Protocol):
    """The contract of an objective. `loss` is required; members with a default are optional."""

    every_token: bool = False
    """whether the loss reads `sides` and `scalars`: both sides of a pair are then computed in full"""

    def loss(self, pairs: ScoredPairs, count: Tensor) -> Loss:
        """(loss [], metrics [] each): the sum over the pairs of `weight` times the loss of each, divided by `count`.

        count: the batch elements of the whole optimizer step; the pairs of one ranked list are one element. The losses
        and metrics of all micro-batches and ranks are added. The stage adds `accuracy` and `margin` to the metrics.
        """


def load(config: RewardConfig) -> Objective:
    """The objective that the options name, with every member of the contract.

    Raises: UserError for an unknown name or option, or a member that is missing or has other arguments.
    """
    name, _ = plugins.parse_spec(config.objective)
    objective: Objective = plugins.conforming(plugins.build(FOLDER, config.objective), Objective, name)
    return FromFile(objective, name) if name.endswith(".py") else objective


def files(config: RewardConfig) -> dict[str, str]:
    """The digest of the user's file, if the objective is one."""
    file = Path(plugins.parse_spec(config.objective)[0])
    return {str(file): str(manifests.digest(file)["sha256"])} if file.suffix == ".py" and file.is_file() else {}


class FromFile:
    """A user's objective. Its exceptions, and results of another type or shape, are a UserError that names the file."""

    def __init__(self, objective: Objective, file: str) -> None:
        self._objective, self._file, self.every_token = objective, file, objective.every_token

    def loss(self, pairs: ScoredPairs, count: Tensor) -> Loss:
        result: Loss = plugins.call(self._file, "loss", self._objective.loss, pairs, count)
        if fault := losses.fault_of(result):
            raise UserError(f"{self._file}: loss returned {fault}")
        return result
