"""Loss spikes: the newest losses stand far above those before them. Pure: numbers in, numbers out."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean, pstdev
from typing import Any

WINDOW = 128
"""losses that the newest are compared with"""
NEWEST = 4
"""losses whose mean counts: one odd batch is no spike unless it is very far out"""
LEAST = 16
"""losses before them, of which fewer say nothing"""
DEVIATIONS = 6.0
"""standard deviations above the mean"""
GROWTH = 2.0
"""of the first loss, before there are LEAST to compare with: a learning rate far too high shows in the first steps"""
SHARE = 0.1
"""and this share of the mean, or a loss that hardly varies would spike at every tremor"""

NAME = "loss_spike"
ADVICE = (
    "the loss jumped and stayed up: lower --learning-rate or raise --warmup-ratio, and read the rows of these steps; "
    "if it does not come down again, go back"
)


class Spikes:
    """Remembers the newest losses of a run and says when one of them jumps, once per onset.

        spike: mean of the newest 4 > m + max(6 s, 0.1 |m|),  m and s mean and deviation of up to 128 losses before

    Window and deviations are those of OLMo-core's SkipStepOptimizer, which looks at single steps and leaves them out;
    the 4 steps are the patience of LLM Foundry's KillLossSpike. Over 80 sound runs of steps 1 and 2, where the reward
    model's losses have a heavy tail, single steps warned in 13, the mean of 4 in none (2026-11-20). A loss that
    stays up is soon the new normal.
    """

    def __init__(self, losses: Sequence[str]) -> None:
        """losses: the metrics that are losses which the stage minimises."""
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=WINDOW + NEWEST) for name in losses}
        self._up: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> dict[str, float] | None:
        """The numbers to show if a loss jumped at this step, else None. What is not finite is not remembered."""
        shown: dict[str, float] = {}
        for name, seen in self._seen.items():
            if not math.isfinite(metrics.get(name, math.nan)):
                continue
            seen.append(metrics[name])
            newest, limit = _newest(seen), _limit(seen, name)
            if newest <= limit:
                self._up.discard(name)
            elif name not in self._up:
                self._up.add(name)
                shown |= {name: newest, f"{name}_limit": limit, f"{name}_before": fmean(_before(seen) or [seen[0]])}
        return shown or None

    def state_dict(self) -> dict[str, Any]:
        """The newest losses, and which of them are up."""
        return {"seen": {name: list(seen) for name, seen in self._seen.items()}, "up": sorted(self._up)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, seen in self._seen.items():
            seen.clear()
            seen.extend(state["seen"][name])
        self._up = set(state["up"])


def _before(seen: deque[float]) -> list[float]:
    return list(islice(seen, max(0, len(seen) - NEWEST)))


def _newest(seen: deque[float]) -> float:
    return fmean(islice(seen, max(0, len(seen) - NEWEST), None))


def _limit(seen: deque[float], name: str) -> float:
    """What the mean of the newest may be. As long as too little is known, GROWTH times the first loss and 1 for `loss`,
    which is above 0 and falls in a sound run; none for the others."""
    before = _before(seen)
    if len(before) < LEAST:
        return GROWTH * seen[0] + 1 if name == "loss" else math.inf
    mean = fmean(before)
    return mean + max(DEVIATIONS * pstdev(before, mean), SHARE * abs(mean))
