"""One algorithm a file: `Config`, its options, derived from `Step3Config`; and `build(config)`, an `Algorithm`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf import plugins
from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.maths.losses import Loss
from rlhf.types import Credit, ScoredRollout
from step3_ppo.config import Step3Config

FOLDER = __name__


@dataclass(frozen=True, slots=True)
class Iteration:
    """One rollout-update cycle, as the schedule plans it."""

    number: int
    """from 0"""
    indices: list[int]
    """of this rank's prompts in the data, each `num_generations` times in a row"""
    kl_coef: float = 0.0
    """weight of the KL to the reference; 0 if the algorithm's Config is not a `KLOptions`"""
    pretrains_critic: bool = False
    """whether the policy does not move yet (`critic_warmup_iterations`); the critic is then fitted to what the
    responses earned, not to its own untrained values"""
    resampled: int = 0
    """prompts of all ranks that were drawn in place of others (`resample_groups`)"""
    step_responses: int = 0
    """in a loss: responses of the whole optimizer step, of which a micro-batch has some"""


class Algorithm(Protocol):
    """The contract of an algorithm. Shapes: B rollouts, T response tokens.

    `credit` and `policy_loss` are required; members with a default are optional. In a loss, the rollout and the credit
    are those of one micro-batch, and `count` is the number of response tokens of the whole optimizer step: the losses
    and metrics of all micro-batches are added.
    """

    value_loss: Callable[[Tensor, ScoredRollout, Credit, Tensor, Iteration], Loss] | None = None
    """(values [B, T], rollout, credit, count, iteration) -> loss of the critic; there is a critic if there is this
    loss"""
    select: Callable[[ScoredRollout], Tensor] | None = None
    """(scored rollout) -> the row numbers of this rank that are learned from, as many on every rank: a multiple of
    num_mini_batches, or on one rank at least so many; None: all rows"""
    state_dict: Callable[[], Tree] | None = None
    """() -> what it keeps between iterations, the same on every rank, as JSON has it; checkpoints hold it"""
    load_state_dict: Callable[[Tree], None] | None = None
    """(what `state_dict` returned) -> a run goes on from there"""

    def credit(self, rollout: ScoredRollout, iteration: Iteration) -> Credit:
        """Advantages and returns, [B, T] each, of a scored rollout: `scores` [B] and, each [B, T], `logprobs`,
        `ref_logprobs`, `mask` and, with a critic, `values`."""

    def policy_loss(
        self, logprobs: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, iteration: Iteration
    ) -> Loss:
        """(loss [], metrics [] each) of the actor, whose log-probs of the response tokens are `logprobs` [B, T]."""


def load(config: Step3Config) -> Algorithm:
    """The algorithm that the options name, with every member of the contract.

    Raises: UserError that names a member that is missing or has another signature.
    """
    algorithm: Algorithm = plugins.build_with(FOLDER, config.algorithm, config)
    algorithm = plugins.conforming(algorithm, Algorithm, config.algorithm)
    return FromFile(algorithm, config.algorithm) if config.algorithm.endswith(".py") else algorithm


class FromFile:
    """A user's algorithm. Its exceptions, and results of another type or shape, are a UserError that names the file."""

    def __init__(self, algorithm: Algorithm, file: str) -> None:
        self._algorithm, self._file = algorithm, file
        self.credit = self._checked("credit", _fault_of_credit)
        self.policy_loss = self._checked("policy_loss", _fault_of_loss)
        self.value_loss = None if algorithm.value_loss is None else self._checked("value_loss", _fault_of_loss)
        self.select = None if algorithm.select is None else self._checked("select", _fault_of_selection)
        self.state_dict, self.load_state_dict = algorithm.state_dict, algorithm.load_state_dict

    def _checked(self, name: str, fault_of: Callable[[Any, Any], str]) -> Callable[..., Any]:
        function = getattr(self._algorithm, name)

        def call(first: object, *others: object) -> Any:
            result = plugins.call(self._file, name, function, first, *others)
            fault = fault_of(result, first)
            if fault:
                raise UserError(f"{self._file}: {name} returned {fault}")
            return result

        return call


def _fault_of_credit(credit: object, rollout: ScoredRollout) -> str:
    shape = tuple(rollout.mask.shape)
    if not isinstance(credit, Credit):
        return f"a value of type {type(credit).__name__}, expected a Credit"
    for name, value in (("advantages", credit.advantages), ("returns", credit.returns)):
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            return f"{name}: {losses.describe(value)}, expected a tensor of shape {shape}, that of the rollout's mask"
    return ""


def _fault_of_loss(loss: object, _: object) -> str:
    return losses.fault_of(loss)


def _fault_of_selection(rows: Any, rollout: ScoredRollout) -> str:
    count = len(rollout.mask)
    integers = isinstance(rows, Tensor) and not rows.is_floating_point() and rows.dtype != torch.bool
    if integers and rows.ndim == 1 and len(rows) and 0 <= int(rows.min()) <= int(rows.max()) < count:
        return ""
    return f"{losses.describe(rows)}, expected a tensor [rows] with one or more row numbers below {count}"
