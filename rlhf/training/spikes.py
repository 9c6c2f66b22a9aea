"""Loss spikes: the newest losses are far above those before them. No side effects."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean, pstdev

from rlhf.config import Tree

WINDOW = 128
"""number of losses that the newest are compared with"""
NEWEST = 4
"""number of losses whose mean is compared: one unusual batch alone is no spike"""
LEAST = 16
"""least number of losses to compare with"""
DEVIATIONS = 6.0
"""standard deviations above the mean"""
GROWTH = 2.0
"""limit, in multiples of the first loss, before there are LEAST losses: a learning rate far too high shows early"""
SHARE = 0.1
"""least excess, as a share of the mean: otherwise a loss that hardly varies would spike at every small change"""

NAME = "loss_spike"
ADVICE = (
    "the loss jumped and stayed high: lower --learning-rate or raise --warmup-ratio, and read the rows of these steps; "
    "if it does not fall again, return to an earlier checkpoint"
)


class Spikes:
    """The newest losses of a run; reports when a loss begins to spike.

        spike: mean of the newest 4 > m + max(6 s, 0.1 |m|),  m and s mean and deviation of up to 128 losses before

    Window and deviations are those of OLMo-core's SkipStepOptimizer, which checks single steps and skips them;
    the 4 steps are the patience of LLM Foundry's KillLossSpike. Over 80 sound runs of steps 1 and 2, where the reward
    model's losses have a heavy tail, single steps warned in 13, the mean of 4 in none (2026-11-20). A loss that
    stays high soon counts as normal.
    """

    def __init__(self, losses: Sequence[str]) -> None:
        """losses: names of the metrics that the stage minimises."""
        self._losses: dict[str, deque[float]] = {name: deque(maxlen=WINDOW + NEWEST) for name in losses}
        self._spiking: set[str] = set()

    def check(self, metrics: Mapping[str, float]) -> dict[str, float] | None:
        """The numbers to show if a loss began to spike at this step, else None. Non-finite losses are ignored."""
        numbers: dict[str, float] = {}
        for name, losses in self._losses.items():
            if not math.isfinite(metrics.get(name, math.nan)):
                continue
            losses.append(metrics[name])
            newest, limit = _newest(losses), _limit(losses, name)
            if newest <= limit:
                self._spiking.discard(name)
            elif name not in self._spiking:
                self._spiking.add(name)
                numbers |= {
                    name: newest,
                    f"{name}_limit": limit,
                    f"{name}_before": fmean(_before(losses) or [losses[0]]),
                }
        return numbers or None

    def state_dict(self) -> Tree:
        """The newest losses, and the names of those that are spiking."""
        return {"seen": {name: list(losses) for name, losses in self._losses.items()}, "up": sorted(self._spiking)}

    def load_state_dict(self, state: Tree) -> None:
        for name, losses in self._losses.items():
            losses.clear()
            losses.extend(state["seen"][name])
        self._spiking = set(state["up"])


def _before(losses: deque[float]) -> list[float]:
    return list(islice(losses, max(0, len(losses) - NEWEST)))


def _newest(losses: deque[float]) -> float:
    return fmean(islice(losses, max(0, len(losses) - NEWEST), None))


def _limit(losses: deque[float], name: str) -> float:
    """The limit of the mean of the newest losses.

    With fewer than LEAST losses before them: GROWTH times the first loss plus 1 for `loss`, which is above 0 and falls
    in a normal run, and no limit for the others.
    """
    before = _before(losses)
    if len(before) < LEAST:
        return GROWTH * losses[0] + 1 if name == "loss" else math.inf
    mean = fmean(before)
    return mean + max(DEVIATIONS * pstdev(before, mean), SHARE * abs(mean))
