"""A tracker that fails hurts no training; a metrics file that cannot be written does."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.training import record


class Broken:
    """A tracker that fails at every call."""

    calls = 0

    def write(self, *_: Any) -> None:
        self.calls += 1
        raise RuntimeError("no route to host")

    warn = write

    def close(self) -> None:
        raise ConnectionError("gone")


@pytest.mark.parametrize("first", ["write", "warn", "close"])
def test_a_tracker_that_fails_hurts_nothing(first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder, broken = record.Recorder(tmp_path), Broken()
    recorder._writers.insert(0, broken)
    if first == "warn":
        recorder.warn(1, "x", {"a": 1.0}, "look")
    if first != "close":
        list(recorder.follow(iter([{"loss": 1.0}, {"loss": 2.0}]), 2, "stage", ()))
        recorder.write("eval", 0, {"loss": 3.0})
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == ([] if first == "close" else [1.0, 2.0, 3.0])
    assert capsys.readouterr().out.count("warning: Broken fails and is left out") == 1
    assert broken.calls == (first != "close")


def test_a_full_disk_is_no_trackers_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = record.Recorder(tmp_path)
    monkeypatch.setattr(record.MetricsFile, "_append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        recorder.write("train", 1, {"loss": 1.0})
