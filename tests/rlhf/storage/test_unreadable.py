"""Files and directories that this user may not read or write, or that the disk no longer gives."""

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.storage import manifests
from rlhf.training import checkpoints
from tests.support.saving import save, whole

NOBODY = 65534


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions count for root too."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def output_dir() -> Iterator[Path]:
    """A directory of the unprivileged user's, with a stage that has checkpoints of steps 1 and 2."""
    output_dir = Path(tempfile.mkdtemp(prefix="rlhf-test-"))
    for step in (1, 2):
        assert save(output_dir / "step1_sft", step) is None
    for path in (output_dir, *output_dir.rglob("*")):
        os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1)
    yield output_dir
    for path in output_dir.rglob("*"):
        if path.exists():
            path.chmod(0o700)
    shutil.rmtree(output_dir)


@pytest.mark.parametrize("name", ["", "manifest.json", "state.json", "weights.rank-0.part-0.safetensors"])
def test_an_unreadable_checkpoint_is_skipped(output_dir: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    newest = checkpoints.folder_of(output_dir / "step1_sft", 2)
    (newest / name).chmod(0)
    with unprivileged():
        assert whole(output_dir / "step1_sft") == 1
        manifest = checkpoints.newest_manifest(output_dir / "step1_sft")
    assert manifest is not None and manifest["step"] == (1 if name in ("", "manifest.json") else 2)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning, {newest} is skipped: ") and "cannot be read (Permission denied)" in line


def test_a_directory_in_place_of_a_manifest_is_damage(output_dir: Path) -> None:
    newest = checkpoints.folder_of(output_dir / "step1_sft", 2)
    (newest / "manifest.json").unlink()
    (newest / "manifest.json").mkdir()
    assert whole(output_dir / "step1_sft") == 1


def test_a_disk_that_fails_costs_one_checkpoint(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = manifests._sha256

    def failing(path: Path) -> Any:
        if "step-00000002" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(manifests, "_sha256", failing)
    assert whole(output_dir / "step1_sft") == 1


def test_a_stage_with_unlistable_checkpoints_does_not_restart(output_dir: Path) -> None:
    stage = output_dir / "step1_sft"
    for mode in (0o000, 0o311):
        (stage / "checkpoints").chmod(mode)
        with unprivileged():
            for lookup in (checkpoints.newest, checkpoints.exist, checkpoints.newest_manifest):
                with pytest.raises(PermissionError):
                    lookup(stage)


def test_a_save_that_cannot_start_fails_at_once(output_dir: Path) -> None:
    stage = output_dir / "step1_sft"
    (stage / "checkpoints").chmod(0o500)
    start = time.monotonic()
    with unprivileged():
        failure = save(stage, 3)
    staging = stage / "checkpoints" / ".tmp-step-00000003"
    assert failure == f"{staging} cannot be created (Permission denied)" and time.monotonic() - start < 10
    (stage / "checkpoints").chmod(0o700)
    assert whole(stage) == 2


@pytest.mark.parametrize("folder", ["step1_sft", "step1_sft/checkpoints"])
def test_an_unwritable_folder_is_refused_at_the_start(output_dir: Path, folder: str) -> None:
    with unprivileged():
        manifests.require_writable(str(output_dir), "step1_sft")
        (output_dir / folder).chmod(0o500)
        with pytest.raises(UserError, match=rf"--output-dir {output_dir}: cannot write there \(Permission denied\)"):
            manifests.require_writable(str(output_dir), "step1_sft")


def test_a_lock_of_another_user_is_one_line(output_dir: Path) -> None:
    (output_dir / manifests.LOCK).touch(mode=0o600)
    lock = manifests.locked(output_dir)
    with unprivileged(), pytest.raises(UserError, match=r"\.lock: cannot be written \(Permission denied\)"):
        lock.__enter__()


def test_a_link_to_another_disk_is_followed(output_dir: Path, tmp_path: Path) -> None:
    """Checkpoints may lie there."""
    stage = output_dir / "step1_sft"
    shutil.move(stage / "checkpoints", tmp_path / "elsewhere")
    (stage / "checkpoints").symlink_to(tmp_path / "elsewhere")
    manifests.require_writable(str(output_dir), "step1_sft")
    assert whole(stage) == 2 and save(stage, 3) is None and whole(stage) == 3
    checkpoints.sweep(stage, everything=True)
    assert (stage / "checkpoints").is_symlink() and not os.listdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rmdir()
    with pytest.raises(UserError, match=r"checkpoints is not a directory"):
        manifests.require_writable(str(output_dir), "step1_sft")
