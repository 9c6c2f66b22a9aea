"""A power cut in earnest: the image of an ext4 disk, copied while a chain writes to it, is what the disk then has."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import harness

pytestmark = pytest.mark.faults
SIZE = 1 << 29


@pytest.fixture
def folder() -> Iterator[Path]:
    """For images."""
    with tempfile.TemporaryDirectory(prefix="rlhf-images-") as path:
        yield Path(path)


@contextlib.contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """The files of an image. They are written down when a program asks for it, or after ten minutes."""
    mount_point = image.with_suffix("")
    mount_point.mkdir()
    mount = ["mount", "-o", "loop,commit=600", str(image), str(mount_point)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no image can be mounted here: {done.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    image = folder / "disk.ext4"
    with image.open("wb") as file:
        file.truncate(SIZE)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(image) as mount_point:
        yield mount_point


@contextlib.contextmanager
def after_power_cut(disk: Path) -> Iterator[Path]:
    """The files of the disk as they are if its power is cut now."""
    copy = disk.with_name("copy.ext4")
    subprocess.run(["cp", "--sparse=always", str(disk.with_suffix(".ext4")), str(copy)], check=True)
    with mounted(copy) as mount_point:
        yield mount_point


def test_a_power_cut_after_the_end_loses_nothing(disk: Path, whole: harness.Whole) -> None:
    out = disk / "out"
    harness.run(out, harness.chain(out, "--steps", "1")).require(0)
    with after_power_cut(disk) as mount:
        harness.run(mount / "out", harness.chain(mount / "out", "--steps", "1")).require(0, "already complete")
        harness.assert_same(mount / "out", whole(1, 1), 1)


def test_a_power_cut_in_training_leaves_the_last_checkpoint(disk: Path, whole: harness.Whole) -> None:
    out = disk / "out"
    with harness.running(out, harness.chain(out, "--steps", "1"), "step:0:6:sleep:300") as run:
        run.reached()
        with after_power_cut(disk) as mount:
            for process in harness.processes(run.id):  # the stage would outlive its launcher by the grace period
                os.kill(process, signal.SIGKILL)
            again = harness.run(mount / "out", harness.chain(mount / "out", "--steps", "1"))
            again.require(0, "resumes after step 4")
            assert "are lost" not in again.output
            harness.assert_same(mount / "out", whole(1, 1), 1)
