"""A rank that is slower than the others is seen in the numbers."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.training import run as stage_run
from rlhf.training.checkpoints import Resumable
from rlhf.training.run import Run


def spread(mine: list[float], ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What stands beside three steps in which this rank's two engines took `mine` seconds and the other rank 2 s."""
    engines: Any = {name: mock.Mock(spec=Engine, forward_s=0.0) for name in ("actor", "critic")}
    run: Any = SimpleNamespace(_state=Resumable({}, {**engines, "ema": mock.Mock()}))

    def steps() -> Any:
        for seconds in mine:
            for engine in engines.values():
                engine.forward_s += seconds / 2
            yield {"loss": 1.0}

    monkeypatch.setattr(collectives, "world_size", lambda: ranks)
    monkeypatch.setattr(stage_run, "_peak_bytes", lambda: 3e9)
    other_rank = [2.0, -2.0, 5e9]
    monkeypatch.setattr(
        collectives, "max_over_ranks", lambda numbers: [max(pair) for pair in zip(numbers, other_rank, strict=True)]
    )
    return list(Run._with_rank_numbers(run, steps()))


def test_the_slowest_and_the_fastest_rank_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = spread([0.5, 3.0, 2.0], 2, monkeypatch)
    extremes = [(row["forward_seconds_fastest"], row["forward_seconds_slowest"]) for row in rows]
    assert [row["peak_memory_gb"] for row in rows] == [5.0] * 3, "of the rank that has the most"
    assert extremes == [(0.5, 2.0), (2.0, 3.0), (2.0, 2.0)]


def test_one_rank_has_nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread([0.5, 3.0], 1, monkeypatch) == [{"loss": 1.0, "peak_memory_gb": 5.0}] * 2
