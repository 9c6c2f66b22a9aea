"""Which phase owns a prompt of the origins that phases share.

`data_split` divides the prompts by content. If a phase can use none of a prompt's rows, its share of such prompts goes
to the other phases, in proportion to their shares: demonstrations are divided between fine-tuning and PPO, text belongs
to fine-tuning alone, and prompts without a response belong to PPO alone. All rows with the prompt decide, whichever
phase a source yields them for (rt_polarity yields demonstrations for sft, pairs for reward, prompts for ppo). So all
stages compute the same owners.
"""

from collections.abc import Sequence

import numpy as np

from data.config import DataOptions
from data.prepare.encode import Recipe, read_rows
from data.prepare.mixture import open_origin
from data.prepare.split import PHASES, group_digest, phase_of_point
from data.read.records import Phase
from rlhf.text.dialogues import Template
from rlhf.types import Row


def unusable_reason(row: Row, phase: Phase) -> str:
    """The reason why the phase cannot use the row, or an empty string."""
    if phase == "ppo":
        return "" if any(message.content.strip() for message in row.prompt) else "empty prompt"
    if phase == "reward" and (row.rejected is None or row.response is None):
        return "no rejected side"
    if row.response is None:
        return "no response"
    if not row.weight:
        return "weight 0"
    return "" if phase == "reward" or row.response.strip() or row.response_keys else "empty response"


def usable_phases(row: Row) -> int:
    """The phases that can use the row, as a bit mask in the order of PHASES."""
    return sum(1 << bit for bit, phase in enumerate(PHASES) if not unusable_reason(row, phase))


class PromptOwners:
    """The owners of the prompts of shared origins."""

    def __init__(self, options: DataOptions, recipe: Recipe, template: Template) -> None:
        self._options, self._recipe, self._template = options, recipe, template
        self._shared = [origin for origin in map(open_origin, options.data_path) if origin.weight != 0]
        shares = sum(1 << bit for bit, share in enumerate(options.data_split) if share)
        streaming = any(origin.streaming for origin in self._shared)  # no end to read to: data_split alone decides
        self._needed = 0 if streaming else shares

    def follows_data_split(self, row: Row) -> bool:
        """Whether every phase with a share can use the row, so that data_split alone decides on its prompt."""
        return self._needed & (self._needed - 1) == 0 or not self._needed & ~usable_phases(row)

    def owned_by_others(self, phase: Phase, groups: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Which groups another phase than `phase` owns, bool. groups, points: digests of `group_digest`; all [N]."""
        if not len(groups):
            return np.zeros(0, dtype=bool)
        unique_groups, inverse = np.unique(groups, return_inverse=True)
        usable = self._usable(unique_groups)[inverse]
        owners = map(phase_of_point, points.tolist(), map(self._shares, usable.tolist()))
        return np.array([owner != phase for owner in owners])

    def _shares(self, usable: int) -> Sequence[float]:
        shares = [share * (usable >> bit & 1) for bit, share in enumerate(self._options.data_split)]
        return shares if sum(shares) else self._options.data_split

    def _usable(self, unique_groups: np.ndarray) -> np.ndarray:
        """The bit mask of the phases that can use each group's rows. unique_groups: sorted; [N]"""
        usable = np.zeros(len(unique_groups), dtype=np.uint8)
        for phase in ("reward", "sft", "ppo"):  # pairs serve all three phases, so one pass is often enough
            for origin in self._shared:
                read = read_rows(origin, phase, self._recipe, self._template)
                rows = (row for row in read if isinstance(row, Row))
                entries = ((group_digest(row, self._options.data_seed)[2], usable_phases(row)) for row in rows)
                table = np.fromiter(entries, [("group", "u8"), ("phases", "u1")])
                table = table[np.isin(table["group"], unique_groups)]
                np.bitwise_or.at(usable, np.searchsorted(unique_groups, table["group"]), table["phases"])
            if np.all(usable & self._needed == self._needed):
                break
        return usable
