"""Checkpoints written beside training: what is in them, who waits for whom, and what is told when one fails."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.options import RunOptions
from rlhf.storage import disk
from rlhf.training import checkpoints, snapshots
from rlhf.training.checkpoints import Resumable
from rlhf.training.saving import Saver
from tests.support.saving import ABOUT, WEIGHTS, Memory, files_up_to, whole


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    saver = Saver(tmp_path, RunOptions(async_checkpoints=True))
    yield saver
    saver.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until it is set."""
    gate, write = threading.Event(), disk.save_tensors

    def waiting(*arguments: Any) -> None:
        assert gate.wait(60)
        write(*arguments)

    monkeypatch.setattr(disk, "save_tensors", waiting)
    return gate


def parts(memory: Memory) -> Resumable:
    return Resumable({"weights": memory}, {"weights": memory}, ["metrics.jsonl"])


def test_a_checkpoint_has_the_state_of_its_step(tmp_path: Path, saver: Saver, gate: threading.Event) -> None:
    """Training goes on while it is written: weights, numbers, random sources and logs change."""
    memory = Memory({"w": WEIGHTS.clone()})
    log = tmp_path / "metrics.jsonl"
    log.write_text("one\n")
    torch.manual_seed(7)
    saver.save(1, parts(memory), ABOUT)
    expected = torch.rand(3)
    memory.by_name["w"].add_(1.0)
    memory.count = 9
    with log.open("a") as file:
        file.write("two\n")
    assert not checkpoints.exist(tmp_path)
    gate.set()
    saver.wait()
    checkpoint = checkpoints.newest(tmp_path)
    assert checkpoint is not None and checkpoint.step == 1 and checkpoint.manifest["logs"] == {"metrics.jsonl": 4}
    checkpoint.restore(parts(memory), seed=0)
    assert torch.equal(memory.by_name["w"], WEIGHTS) and memory.count == 1
    assert torch.equal(torch.rand(3), expected)


def test_the_next_save_and_the_end_wait_for_the_one_before(
    tmp_path: Path, saver: Saver, gate: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = Memory({"w": WEIGHTS.clone()})
    saver.save(1, parts(memory), ABOUT)
    timer = threading.Timer(0.3, gate.set)
    timer.start()
    saver.save(2, parts(memory), ABOUT)
    assert gate.is_set() and whole(tmp_path) in (1, 2)
    saver.close()
    timer.join()
    assert whole(tmp_path) == 2 and saver.last().endswith("step-00000002")
    saver.report_failure()
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_told_in_the_loop(
    tmp_path: Path, saver: Saver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory({"w": WEIGHTS.clone()})
    saver.save(1, parts(memory), ABOUT)
    saver.wait()
    with files_up_to(10):
        saver.save(2, parts(memory), ABOUT)
        saver.close()
        assert capsys.readouterr().out == ""
        saver.report_failure()
    [warning] = capsys.readouterr().out.splitlines()
    assert (
        warning.startswith("warning, step 2: no checkpoint, rank 0 cannot write")
        and "the last checkpoint is" in warning
    )
    assert whole(tmp_path) == 1

    def broken(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    another = Saver(tmp_path, RunOptions(async_checkpoints=True))
    monkeypatch.setattr(snapshots, "SnapshotWriter", broken)
    another.save(3, parts(memory), ABOUT)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        another.wait()
    another.close()
    assert json.loads((checkpoints.folder_of(tmp_path, 1) / "manifest.json").read_text())["step"] == 1


def test_the_copies_stay_from_save_to_save(tmp_path: Path, saver: Saver) -> None:
    """Pages of memory that are fresh take longer than the copy: 0.9 to 2.4 s of 600 MB, else 0.2 to 0.6 s."""
    memory = Memory({"w": WEIGHTS.to(torch.bfloat16), "x": torch.ones(2, 2).t()})
    addresses = []
    for step in (1, 2, 3):
        saver.save(step, parts(memory), ABOUT)
        addresses.append({name: copy.data_ptr() for name, copy in saver._copies.items()})
    assert addresses[0] == addresses[1] == addresses[2] and len(addresses[0]) == 2
    assert all(copy.dtype == torch.float32 for copy in saver._copies.values())
