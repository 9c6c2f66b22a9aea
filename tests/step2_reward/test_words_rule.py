"""The bag of words beside a reward model: rank 0 fits it, and every rank has its accuracy."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.distributed import collectives
from step2_reward import heldout, stage
from tests.support import reward_runs, tiny

PAIRS = [SimpleNamespace(chosen=[1, 5, kind], rejected=[1, 5, 9], prompt_length=2) for kind in (7, 8, 7, 8)]


class Pairs(list[Any]):
    weights = np.array([1.0, 1.0, 0.5, 0.5])


@pytest.mark.parametrize("rank", [0, 1])
def test_held_out_pairs_keep_their_weights_on_every_rank(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their gaps in length, and their rows; a pair is known by its score, here the length of its chosen side."""

    def lengths_of(_: Any, pairs: Any) -> Any:
        scores = torch.stack([pairs.chosen.lengths, pairs.rejected.lengths], 1).float()
        return SimpleNamespace(scores=scores)

    dataset = reward_runs.rows_of(reward_runs.config_of(tmp_path))
    weights = dataset.weights.tolist()
    monkeypatch.setattr(collectives, "rows_of_rank", lambda count: [*range(rank, count, 2)])
    engine: Any = SimpleNamespace(inference=lambda: contextlib.nullcontext())
    scored = heldout.score_pairs(engine, dataset, 3, tiny.PAD, lengths_of)
    pairs = [(dataset[i], weights[i], i) for i in range(rank, len(dataset), 2)]
    expected = [[len(x.chosen), len(x.rejected), w, len(x.chosen) - len(x.rejected), i] for x, w, i in pairs]
    torch.testing.assert_close(torch.tensor(sorted(scored.tolist())), torch.tensor(sorted(expected)))
    assert len({*weights}) > 1


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
