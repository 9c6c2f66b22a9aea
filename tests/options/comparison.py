"""A run beside what is predicted of it, number by number in the order in which they come about."""

import math
from collections.abc import Mapping
from typing import Any

from tests.options.harness import Observed
from tests.options.reference import Network

OPERATIONS = 12 * 32 * 8
"""rounded one after another on the way to a number: a pass of the models of world.py has about 12 sums in a row, of 32
numbers at most, and the passes of four optimizer steps, forward and back, follow one another. No step makes an error
larger, because learning rates are below adam_epsilon."""
TOLERANCE = OPERATIONS * 2.0**-24
"""of fp32 numbers near 1"""
MARKS = (
    "eval_kl",
    "eval_judge",
    "eval_perplexity",
    "eval_accuracy",
    "score_at_clip",
    "score_disagreement",
    "tis_capped",
    "policy_loss",
    "value_loss",
    "ptx_nll",
    "nll",
    "token_loss",
)
"""metrics that a step has only if something was done in it"""


class Comparison:
    """Every number predicted is asserted to be that of the run, up to `room` times TOLERANCE."""

    def __init__(self, observed: Observed, room: float = 1.0) -> None:
        self.observed, self._limit, self._steps = observed, room * TOLERANCE, 0

    def step(self, metrics: Mapping[str, float]) -> None:
        """The metrics of the next optimizer step, or iteration."""
        assert self._steps < len(self.observed.metrics), f"{self._steps} steps {self.observed.error}, expected more"
        logged = self.observed.metrics[self._steps]
        self._steps += 1
        assert [name in metrics for name in MARKS] == [name in logged for name in MARKS]
        self._numbers(f"step {self._steps}", metrics, logged)

    def end(self, metrics: Mapping[str, float], networks: Mapping[str, Network], best: list[int] | None = None) -> None:
        """The metrics of the run, its trained networks, and after how many iterations each best policy came."""
        assert self._steps == len(self.observed.metrics) and not self.observed.error, self.observed.error
        assert self.observed.best == (best or [])
        self._numbers("the run", metrics, self.observed.final)
        weights: dict[str, Any] = {}
        for title, network in networks.items():
            own = network.weights()
            has_lm = any(name.startswith(f"{title}.lm.") for name in self.observed.weights)
            prefix = f"{title}.lm.transformer." if has_lm else f"{title}.backbone."
            weights |= {f"{title}.{n}" if n == "score.weight" else prefix + n: w for n, w in own.items()}
        assert set(weights) == set(self.observed.weights)
        for name, weight in weights.items():
            self._require(name, float((weight - self.observed.weights[name]).abs().max()))

    def _numbers(self, of: str, metrics: Mapping[str, float], logged: Mapping[str, float]) -> None:
        assert set(metrics) <= set(logged), f"{of} has no {', '.join(set(metrics) - set(logged))}"
        for name, value in metrics.items():
            self._require(f"{name} of {of}", abs(value - logged[name]) / max(1.0, abs(value)))

    def _require(self, name: str, gap: float) -> None:
        assert math.isfinite(gap) and gap <= self._limit, (
            f"{name} is {gap:.1e} from what its options predict, expected at most {self._limit:.1e}"
        )
