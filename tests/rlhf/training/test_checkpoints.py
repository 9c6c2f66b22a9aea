"""Checkpoints under faults: a disk that is full, files that are damaged, a process that dies at any point of a save."""

import json
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config import parser
from rlhf.config.options import RunOptions
from rlhf.errors import UserError
from rlhf.storage import disk
from rlhf.training import checkpoints
from rlhf.training.checkpoints import Resumable
from tests.support import forked_ranks, programs, saving
from tests.support.killing import Killed
from tests.support.saving import POINTS, Memory, killed_by, save, whole

MIB = 1 << 20


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """The directory of a stage with whole checkpoints of steps 1 and 2."""
    for step in (1, 2):
        assert save(tmp_path, step) is None
    return tmp_path


def names(stage: Path) -> set[str]:
    return {path.name for path in (stage / "checkpoints").iterdir()}


# --- the order of what a save does


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_dies_while_saving_leaves_the_old_or_the_new(
    stage: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    *call, is_there = POINTS[point]
    memory = Memory({"w": saving.WEIGHTS.clone()})
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_by(patched, *call)
        checkpoints.save(stage, 3, Resumable({"weights": memory}, {"weights": memory}), saving.ABOUT, 2)
    assert whole(stage) == (3 if is_there else 2)
    if not is_there:  # the old ones were not touched
        assert {"step-00000001", "step-00000002"} <= names(stage)
    checkpoints.sweep(stage)
    assert not [name for name in names(stage) if name.startswith(".")]
    assert save(stage, 3) is None and whole(stage) == 3
    assert names(stage) == {"step-00000002", "step-00000003"}


def test_one_checkpoint_alone_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        parser.parse(RunOptions, ["--keep", "1"], "train.py", "")

    code, _, message = programs.runner("train.py", main, monkeypatch, capsys)()
    assert code == 2 and "keep" in message and "greater than or equal to 2, got 1" in message


def test_the_step_in_the_name_counts_whatever_the_clock_says(tmp_path: Path) -> None:
    for age, step in enumerate((9, 10, 100)):
        assert save(tmp_path, step, keep=3) is None
        for path in (*checkpoints.folder_of(tmp_path, step).iterdir(), checkpoints.folder_of(tmp_path, step)):
            os.utime(path, (1e9 - age * 86400, 1e9 - age * 86400))
    assert whole(tmp_path) == 100
    assert save(tmp_path, 101) is None
    assert names(tmp_path) == {"step-00000100", "step-00000101"}


def test_what_lies_beyond_a_damaged_one_goes_with_the_next_save(stage: Path) -> None:
    """Two of later steps that nobody can read must not push out the one just written."""
    assert save(stage, 8, keep=9) is None and save(stage, 9, keep=9) is None
    for step in (8, 9):
        (checkpoints.folder_of(stage, step) / "state.json").unlink()
    assert whole(stage) == 2
    assert save(stage, 3) is None
    assert names(stage) == {"step-00000002", "step-00000003"} and whole(stage) == 3


# --- what others put there


def test_only_what_a_save_has_left_is_swept(stage: Path) -> None:
    for folder in (".tmp-step-00000003", "notes", "step-00000002-mine", "step-two"):
        (stage / "checkpoints" / folder).mkdir()
        (stage / "checkpoints" / folder / "file").write_text("mine")
    (stage / "notes.txt").write_text("mine")
    (stage / "checkpoints" / "step-7").write_text("a file")
    checkpoints.sweep(stage)
    assert names(stage) == {"step-00000001", "step-00000002", "notes", "step-00000002-mine", "step-two", "step-7"}
    assert save(stage, 3) is None and whole(stage) == 3
    checkpoints.sweep(stage, everything=True)
    assert names(stage) == {"notes", "step-00000002-mine", "step-two", "step-7"}
    assert (stage / "notes.txt").read_text() == "mine"
    assert all((stage / "checkpoints" / name / "file").read_text() == "mine" for name in ("notes", "step-two"))


def test_a_directory_of_checkpoints_alone_goes_with_them(stage: Path) -> None:
    checkpoints.sweep(stage, everything=True)
    assert not (stage / "checkpoints").exists()


def test_a_stray_file_is_said_and_ignored(stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.folder_of(stage, 2)
    shutil.copy(folder / "weights.rank-0.part-0.safetensors", folder / "weights.rank-1.part-0.safetensors")
    assert whole(stage) == 2
    assert f"{folder}: ignored weights.rank-1.part-0.safetensors" in capsys.readouterr().out


# --- damage


FILES = ("weights.rank-0.part-0.safetensors", "state.json", "rng.rank-0.json", "manifest.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in two": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a bit at the end": lambda path: saving.flip(path, -1),
    "a bit in the middle": lambda path: saving.flip(path, path.stat().st_size // 2),
    "a bit at the start": lambda path: saving.flip(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_named_and_passed_over(
    stage: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, older = checkpoints.folder_of(stage, 2), checkpoints.folder_of(stage, 1)
    DAMAGES[damage](newest / name)
    assert whole(stage) == 1
    output = capsys.readouterr().out
    assert f"warning, {newest} is skipped: " in output and name in output and output.count("\n") == 1
    DAMAGES[damage](older / name)
    with pytest.raises(UserError, match=r"all checkpoints there are damaged .*--overwrite") as caught:
        checkpoints.newest(stage)
    assert str(stage) in str(caught.value) and "\n" not in str(caught.value)
    assert names(stage) == {"step-00000001", "step-00000002"}  # nobody threw them away


def test_an_empty_directory_is_no_checkpoint_and_no_fault(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoints.newest(tmp_path) is None and not checkpoints.exist(tmp_path)


# --- the disk, and file systems that show late what they have


def test_a_disk_that_is_full_costs_one_checkpoint(tmp_path: Path) -> None:
    """A file beyond the limit fails as on a full disk."""
    big = {"weights": Memory({"w": torch.arange(MIB, dtype=torch.float32)})}
    assert save(tmp_path, 1, big) is None
    with saving.files_up_to(MIB):
        failure = save(tmp_path, 2, big)
    assert failure is not None and "\n" not in failure
    staging = tmp_path / "checkpoints/.tmp-step-00000002"
    assert failure.startswith(f"rank 0 cannot write {staging}/weights.rank-0.part-0.safetensors (")
    free = shutil.disk_usage(tmp_path).free
    stated = float(failure.rsplit("; ", 1)[1].split()[0].replace(",", "")) * 1e6
    assert abs(stated - free) < max(0.1 * free, 1e9) and failure.endswith("MB are free there")
    assert names(tmp_path) == {"step-00000001"} and checkpoints.newest(tmp_path)
    assert save(tmp_path, 3, big) is None and names(tmp_path) == {"step-00000001", "step-00000003"}


def test_the_disk_of_the_checkpoints_is_the_one_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`checkpoints` may be a link to another disk."""
    disks: list[Path] = []

    def usage(path: Path) -> Any:
        disks.append(Path(path).resolve())
        return namedtuple("Usage", "free")(100)

    (tmp_path / "stage").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "stage/checkpoints").symlink_to(tmp_path / "other")
    monkeypatch.setattr(shutil, "disk_usage", usage)
    checkpoints.require_room(tmp_path / "stage", 100)
    checkpoints.require_room(tmp_path / "none", 100)
    assert disks == [tmp_path / "other", tmp_path]
    with pytest.raises(UserError, match="are free there"):
        checkpoints.require_room(tmp_path / "stage", 101)


@pytest.mark.parametrize("name", ["state.json", "rng.rank-0.json", "manifest.json"])
def test_a_small_file_that_cannot_be_written_costs_one_checkpoint(
    stage: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = disk.write_json

    def full(path: Path, value: Any) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device", str(path))
        real(path, value)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "write_json", full)
        failure = save(stage, 3)
    assert failure is not None and "No space left on device" in failure and name in failure
    assert names(stage) == {"step-00000001", "step-00000002"} and whole(stage) == 2


def test_a_directory_that_shows_late_is_waited_for(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system: made by another host, and seen half a second later."""
    make, timers = Path.mkdir, []

    def late(path: Path, *arguments: Any, **named: Any) -> None:
        timers.append(threading.Timer(0.5, make, (path, *arguments), named))
        timers[-1].start()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", late)
        assert save(stage, 3) is None
    assert timers and whole(stage) == 3
    folder = checkpoints.folder_of(stage, 3)
    hidden = folder.rename(stage / "hidden")
    monkeypatch.setattr(checkpoints, "_newest_first", lambda _: [folder])  # what rank 0 sees, and tells the others
    timer = threading.Timer(0.5, hidden.rename, (folder,))
    timer.start()
    assert whole(stage) == 3
    for started in (*timers, timer):
        started.join()


def test_a_directory_that_never_shows_is_not_waited_for_for_ever(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "VISIBLE_S", 0.2)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", lambda *_, **__: None)
        failure = save(stage, 3)
    assert failure is not None and "cannot write" in failure and whole(stage) == 2


# --- two ranks


def test_two_ranks_save_and_fall_back_together(tmp_path: Path) -> None:
    printed = forked_ranks.run("tests.support.saving", str(tmp_path))
    zero, one = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))

    # Rank 0 alone gives a checkpoint its name.
    assert zero.pop("renames") == ["step-00000001", "step-00000002", "step-00000003"] and one.pop("renames") == []
    assert zero == one  # of all else the ranks say the same

    for rank in (0, 1):  # the disk of one of them is full
        report = zero.pop(f"full {rank}")
        file = tmp_path / f"full {rank}/checkpoints/.tmp-step-00000002/weights.rank-{rank}.part-0.safetensors"
        assert report["failure"].startswith(f"rank {rank} cannot write {file} (")
        assert report["between"] == ["step-00000001"] and report["after"] is None and report["newest"] == 3

    assert len(zero) == sum(map(len, saving.HARMS.values()))
    for what, report in zero.items():
        kind, name = what.split()
        assert report["whole"] == 2 and report["without 2"] == 1, what
        assert "all checkpoints there are damaged" in report["without 1"], what
        newest = tmp_path / kind / name / "checkpoints/step-00000002"
        [warning] = {line for line in printed.splitlines() if f"warning, {newest} is skipped: " in line}
        assert name in warning


# --- what a checkpoint holds


def test_what_was_saved_comes_back_whatever_the_size_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"layer.{i}": torch.randn(3, i + 1) for i in range(7)} | {"bits": torch.randn(4).to(torch.bfloat16)}
    for bytes_held in (1, 50, 1 << 20):
        monkeypatch.setattr(checkpoints, "PART_BYTES", bytes_held)
        memory = Memory(tensors)
        stage = tmp_path / str(bytes_held)
        assert save(stage, 1, {"weights": memory}) is None
        parts = list(checkpoints.folder_of(stage, 1).glob("weights.*"))
        assert len(parts) == {1: 8, 50: 5, 1 << 20: 1}[bytes_held]
        again = Memory({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        checkpoint = checkpoints.newest(stage)
        assert checkpoint is not None
        checkpoint.restore(Resumable({"weights": again}, {"weights": again}), seed=0)
        assert all(torch.equal(again.by_name[name], tensor) for name, tensor in tensors.items())
        assert again.count == memory.count


def test_what_a_checkpoint_does_not_have_begins_anew(stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, average = Memory({"w": torch.zeros(3)}), Memory({"w": torch.full((3,), 7.0)})
    checkpoint = checkpoints.newest(stage)
    assert checkpoint is not None
    checkpoint.restore(Resumable({"weights": weights, "average": average}, {"weights": weights, "average": average}), 0)
    assert f"note: {checkpoint.folder} has no average, which starts from its initial state" in capsys.readouterr().out
    assert torch.equal(weights.by_name["w"], saving.WEIGHTS) and (average.by_name["w"] == 7.0).all()
