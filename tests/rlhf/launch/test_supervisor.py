"""How long a group of ranks that was asked to end may go on, on a clock of the test."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.launch import failure_summary, supervisor
from rlhf.launch.failure_summary import has_unsaved_steps
from rlhf.launch.supervisor import REQUEUE, TERMINATED, GroupWatch, RankExit, Signals

GRACE_S, SIGNAL_AT = 30.0, 10.0


class Clock:
    """Time that passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Rank:
    """One rank in an iteration, which saves at one time and has ended in order two seconds later."""

    def __init__(self, clock: Clock, saves_at: float) -> None:
        self._clock, self._saves_at, self._killed, self.ended = clock, saves_at, False, False

    def unsaved(self) -> bool:
        return self._clock.now < self._saves_at

    def running(self) -> list[int]:
        return [] if self.ended else [0]

    def poll(self) -> list[RankExit]:
        if not self._killed and self._clock.now < self._saves_at + 2:
            return []
        self.ended = True
        return [RankExit(0, -signal.SIGKILL, state="S") if self._killed else RankExit(0, TERMINATED)]

    def signal(self, number: int) -> None:
        self._killed = self._killed or number == signal.SIGKILL


def watched(
    monkeypatch: pytest.MonkeyPatch, saves_at: float, steps_are_done: bool, signals_at: tuple[float, ...]
) -> tuple[int, float]:
    """The exit code, and the time of the end."""
    clock, signals = Clock(), Signals()
    rank = Rank(clock, saves_at)

    def poll() -> list[RankExit]:
        while waiting and clock.now >= waiting[0]:
            signals.remember(signal.SIGTERM)
            waiting.pop(0)
        return Rank.poll(rank)

    waiting = [*signals_at]
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(rank, "poll", poll)
    code = GroupWatch(rank, signals, GRACE_S, rank.unsaved if steps_are_done else lambda: False).wait()
    return int(code), clock.now


@pytest.mark.parametrize("saves_at", [12, 39, 41, 60, 69.9, 99.99, 500])
def test_finished_steps_are_waited_for_however_long_the_present_one_takes(
    saves_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, end = watched(monkeypatch, saves_at, True, (SIGNAL_AT,))
    assert code == -signal.SIGTERM and end == pytest.approx(saves_at + 2, abs=0.2)


def test_without_a_finished_step_the_grace_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    code, end = watched(monkeypatch, 500, False, (SIGNAL_AT,))
    assert code == -signal.SIGKILL and end == pytest.approx(SIGNAL_AT + GRACE_S, abs=0.2)


@pytest.mark.parametrize("second", [12.0, 300.0])
def test_a_second_signal_ends_the_wait(second: float, monkeypatch: pytest.MonkeyPatch) -> None:
    code, end = watched(monkeypatch, 500, True, (SIGNAL_AT, second))
    assert code == -signal.SIGTERM and end == pytest.approx(second, abs=0.2)


@pytest.mark.parametrize(("code", "name"), [(REQUEUE, "SIGUSR1"), (TERMINATED, "SIGTERM")])
def test_a_signal_that_one_rank_alone_received_is_named(code: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(Clock(), saves_at=0)

    def poll() -> list[RankExit]:
        rank.ended = True
        return [RankExit(0, code)]

    monkeypatch.setattr(rank, "poll", poll)
    status = GroupWatch(rank, Signals(), GRACE_S).wait()
    assert (int(status), status.cause) == (code, name)


def test_a_signal_after_the_last_rank_has_ended_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a chain goes on with the next stage."""
    signals, rank = Signals(), Rank(Clock(), saves_at=0)

    def poll() -> list[RankExit]:
        rank.ended = True
        signals.remember(signal.SIGINT)
        return [RankExit(0, 0)]

    monkeypatch.setattr(rank, "poll", poll)
    monkeypatch.setattr(supervisor, "time", Clock())
    assert GroupWatch(rank, signals, GRACE_S).wait() == -signal.SIGINT


def test_a_signal_that_nobody_has_taken_is_raised_again() -> None:
    with pytest.raises(KeyboardInterrupt), Signals():
        signal.raise_signal(signal.SIGINT)


def test_a_step_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest took 20 s, an evaluation: five times as much without a byte is too long."""
    stage = tmp_path / "step3_ppo"
    (stage / "checkpoints" / ".tmp-step-00000002").mkdir(parents=True)
    metrics, saving = stage / "metrics.jsonl", stage / "checkpoints" / ".tmp-step-00000002" / "actor"
    rows = [{"kind": "eval", "step": 0, "seconds": 20.0}, {"kind": "train", "step": 1, "seconds": 30.0}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    saving.touch()
    for path in (*stage.rglob("*"), stage):
        os.utime(path, (1000.0, 1000.0))
    for now, waited in ((1099.0, True), (1101.0, False)):
        monkeypatch.setattr(failure_summary, "time", SimpleNamespace(time=lambda now=now: now))
        assert has_unsaved_steps(stage) == waited
    os.utime(saving, (1090.0, 1090.0))  # a checkpoint is being written
    assert has_unsaved_steps(stage)


def test_which_steps_are_unsaved(tmp_path: Path) -> None:
    stage = tmp_path / "step1_sft"

    def checkpoint(step: int) -> None:
        (stage / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (stage / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()

    assert not has_unsaved_steps(stage)
    stage.mkdir()
    rows = [{"kind": "eval", "step": 0}, {"kind": "train", "step": 1}, {"kind": "train", "step": 2}]
    (stage / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert not has_unsaved_steps(stage)
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert has_unsaved_steps(stage)
    checkpoint(1)
    assert has_unsaved_steps(stage)
    checkpoint(2)
    assert not has_unsaved_steps(stage)
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[2], "step": 3}]))
    assert has_unsaved_steps(stage)
    (stage / "manifest.json").touch()
    assert not has_unsaved_steps(stage)
