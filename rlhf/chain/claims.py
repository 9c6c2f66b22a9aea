"""What a run claims, what was computed instead, and how far rounding can bring the two apart.

The bounds are derived. A run computes in a dtype with the step eps, so that one rounding is off by eps / sqrt(12) of a
number in the root mean square. From the ids to a logit or score, a layer rounds ROUNDINGS times, and in fp32 each of
its PRODUCTS adds up `width` terms, with a rounding each; dtypes of fewer bits are summed in fp32. The errors of n
roundings add up like a random walk (Higham & Mary 2019, SIAM J. Sci. Comput. 41), so that a number is off by

    s = eps / sqrt(12) sqrt(n) scale,  n = layers (ROUNDINGS + PRODUCTS width)

with the root mean square of the logits, or scores, as `scale`. The largest of N such errors is below z s, with
z = sqrt(2 log(2 N / P)), but with probability P. A log-prob is a logit less a log-sum-exp: sqrt(2) s; the log-sum-exp
of rounded logits is s^2 / 2 too large in the mean. The KL of T tokens has 2 T log-probs. Counts have no error.

Merging an adapter rounds each weight once more, so that each of the PRODUCTS of a layer is off by one rounding. That
error is the same whenever the weight is used: in a mean over tokens it stays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUNDINGS = 16
"""of a layer: two norms, rotation, scores, softmax, seven products, activation, gate, two sums"""
PRODUCTS = 7
P = 1e-6
EPS = 2.0**-23
"""the step of fp32"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A number that a run claims, and what was computed instead."""

    name: str
    claim: Any
    recount: Any
    """None: it was not computed again"""
    bound: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the two are within the bound of each other, or neither is a finite number."""
        if self.recount is None or isinstance(self.claim, str):
            return self.recount is None or bool(self.claim == self.recount)
        if not math.isfinite(self.claim):
            return not math.isfinite(self.recount)
        return bool(abs(self.claim - self.recount) <= self.bound)

    @property
    def line(self) -> str:
        """The row of a table with the columns name, claim, recount and bound."""
        cells = [x if isinstance(x, str) else f"{x:.7g}" for x in (self.claim, self.recount) if x is not None]
        cells += ["not computed"] if self.recount is None else [f"{self.bound:.1g}" if self.bound else "equal"]
        return f"  {self.name:<52}{''.join(f'{cell:>14}' for cell in cells)}{'' if self.holds else '  DIFFERS'}"


def same(name: str, is_same: bool) -> Claim:
    """A claim of something that is no number."""
    return Claim(name, "as recorded", "as recorded" if is_same else "another")


def largest_error(spread: float, count: int) -> float:
    """The bound z s of `count` numbers. spread: s"""
    return math.sqrt(2 * math.log(2 * max(1, count) / P)) * spread


def log_prob_spread(spread: float, log_probs: Tensor) -> float:
    """s of a log-prob: that of its logit, and its own rounding. With all logits near 0 it is still ln(vocabulary)."""
    return math.hypot(spread, EPS * log_probs.square().mean().sqrt().item())


def mean_error(spread: float, count: int) -> float:
    """The bound of the mean of `count` log-probs. spread: s of a logit"""
    return largest_error(spread, 1) * math.sqrt(2 / count) + spread**2 / 2


def merging_error(spread: float) -> float:
    """The bound of what merging changes in the mean of log-probs. spread: s of a logit"""
    return math.sqrt(2) * largest_error(spread, 1)


def farthest(name: str, claims: Sequence[float], values: Tensor, bound: float) -> Claim:
    """The largest difference between N saved numbers and those computed again."""
    if len(claims) != len(values):
        return Claim(f"{name}, their number", len(claims), len(values))
    worst = int((torch.tensor(claims, dtype=torch.float64) - values).abs().argmax())
    return Claim(f"{name}, the farthest of {len(values)}", claims[worst], values[worst].item(), bound)
