"""The bag of words beside a reward model: rank 0 fits it, and every rank has its accuracy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.distributed import collectives
from step2_reward import stage

PAIRS = [SimpleNamespace(chosen=[1, 5, kind], rejected=[1, 5, 9], prompt_length=2) for kind in (7, 8, 7, 8)]


class Pairs(list[Any]):
    weights = np.array([1.0, 1.0, 0.5, 0.5])


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_fits_it(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []

    def gaps(train: Any, held_out: Any) -> Any:
        fitted.append(len(train))
        return fit(train, held_out)

    fit = stage.preference_gaps
    monkeypatch.setattr(stage, "preference_gaps", gaps)
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "gather_objects", lambda value: [value, 0.0] if rank == 0 else [1.0, value])
    learner: Any = SimpleNamespace(_data=SimpleNamespace(train=Pairs(PAIRS), evaluation=Pairs(PAIRS)))
    assert stage.RewardModelling._words_rule.func(learner) == 1.0  # type: ignore[attr-defined]
    assert fitted == ([4] if rank == 0 else [])
