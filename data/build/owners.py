"""Which phase owns a prompt of the places that phases share.

`data_split` divides the prompts by content. A phase that can use none of a prompt's rows leaves its share of such
prompts to the phases that can, in the proportion of theirs: demonstrations are divided between fine-tuning and PPO,
text is fine-tuning's alone, prompts without a response are PPO's alone. A row says itself what it can be used for, and
the rows that a source gives to any phase decide together on their prompt (rt_polarity gives demonstrations to sft,
pairs to reward, prompts to ppo). So the stages agree, whichever of them reads.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from data.build.mixture import Origin, open_origin
from data.build.split import PHASES, group_digest, phase_at
from data.config import DataOptions
from data.read.records import Phase
from rlhf.types import Row


def useless(row: Row, phase: Phase) -> str:
    """Why the phase has no use for the row, or an empty string."""
    if phase == "ppo":
        return "" if any(message.content.strip() for message in row.prompt) else "empty prompt"
    if phase == "reward":
        return "no rejected side" if row.rejected is None or row.response is None else ""
    if row.response is None:
        return "no response"
    return "" if row.response.strip() else "empty response"


def usable_by(row: Row) -> int:
    """The phases that have a use for the row: one bit each, in the order of PHASES."""
    return sum(1 << bit for bit, phase in enumerate(PHASES) if not useless(row, phase))


class Owners:
    """The owners of prompts of the shared places."""

    def __init__(self, options: DataOptions) -> None:
        self._options = options
        self._shared = _shared_places(options)
        shares = sum(1 << bit for bit, share in enumerate(options.data_split) if share)
        endless = any(origin.streaming for origin in self._shared)  # cannot be looked through: data_split holds
        self._needed = 0 if endless else shares

    def are_clear(self, row: Row) -> bool:
        """Whether every phase with a share has a use for the row, so that its prompt is divided by data_split."""
        return self._needed & (self._needed - 1) == 0 or not self._needed & ~usable_by(row)

    def others(self, phase: Phase, groups: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Which groups another phase than `phase` owns. groups, points: digests of `group_digest`; all [N]."""
        if not len(groups):
            return np.zeros(0, dtype=bool)
        names, which = np.unique(groups, return_inverse=True)
        usable = self._usable(names)[which]
        owners = map(phase_at, points.tolist(), map(self._shares, usable.tolist()))
        return np.array([owner != phase for owner in owners])

    def _shares(self, usable: int) -> Sequence[float]:
        shares = [share * (usable >> bit & 1) for bit, share in enumerate(self._options.data_split)]
        return shares if sum(shares) else self._options.data_split

    def _usable(self, names: np.ndarray) -> np.ndarray:
        """What the rows of each group can be used for, as `usable_by` says it. names: sorted; [N]"""
        found = np.zeros(len(names), dtype=np.uint8)
        for phase in ("reward", "sft", "ppo"):  # pairs will do for all three, so that often one reading is enough
            for origin in self._shared:
                groups, bits = array("Q"), array("B")
                for row in origin.rows(phase):
                    if isinstance(row, Row):
                        groups.append(group_digest(row, self._options.data_seed)[2])
                        bits.append(usable_by(row))
                read = np.array(groups, dtype=np.uint64)
                known = np.isin(read, names)
                np.bitwise_or.at(found, np.searchsorted(names, read[known]), np.array(bits, dtype=np.uint8)[known])
            if np.all(found & self._needed == self._needed):
                break
        return found


def _shared_places(options: DataOptions) -> list[Origin]:
    return [origin for origin in map(open_origin, options.data_path) if origin.weight != 0]
