"""A disk that is full anywhere but in a checkpoint: one line, which names the file; the same command goes on later."""

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from rlhf import errors
from rlhf.chain import command as train
from rlhf.errors import UserError
from rlhf.storage import disk
from rlhf.training import record
from rlhf.training.run import Run
from tests.support import programs, saving
from tests.support.killing import run, sft_options

SAVE = Run.save


def with_small_files(self: Run, *arguments: Any) -> None:
    with saving.files_up_to(20_000):
        SAVE(self, *arguments)


def test_a_model_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors' error is no OSError. The same command then writes the model, with the modes that the umask gives."""
    monkeypatch.chdir(tmp_path)
    options = sft_options(max_train_rows=16)
    with monkeypatch.context() as patched:
        patched.setattr(Run, "save", with_small_files)
        with pytest.raises(UserError, match=r"out/step1_sft/model: cannot be written \(.*\); free space there"):
            run(options)
    assert not Path("out/step1_sft/manifest.json").exists()
    before = os.umask(0o027)
    try:
        run(options)
    finally:
        os.umask(before)
    for path in Path("out/step1_sft/model").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path


def test_an_export_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save = PreTrainedModel.save_pretrained

    def on_a_full_disk(self: Any, *arguments: Any, **named: Any) -> None:
        with saving.files_up_to(20_000):
            save(self, *arguments, **named)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", on_a_full_disk)
    with pytest.raises(UserError, match=r"exports/step-00000001: cannot be written \(.*\); free space there"):
        run(sft_options(max_train_rows=16, export_every=1))
    assert not [*Path("out/step1_sft/exports").glob("step-*")]


def test_metrics_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    file = record.MetricsFile(tmp_path / "metrics.jsonl")
    file.write("train", 1, {"loss": 1.0})
    with saving.files_up_to(100):
        with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written \(File too large\); free space there"):
            for step in range(2, 9):
                file.write("train", step, {"loss": 1.0})
        with contextlib.suppress(UserError):
            file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_a_small_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with saving.files_up_to(10), pytest.raises(OSError, match="File too large") as caught:
        disk.write_text(tmp_path / "config.yaml", "x" * 100)
    assert errors.system_error_line(caught.value) == (
        f"{tmp_path}/config.yaml: File too large; free disk space there, and run the same command again"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO])
def test_what_the_machine_refuses_at_the_start_is_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: str) -> None:
        raise OSError(number, os.strerror(number), "out/x")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlhf.storage.manifests.require_writable", refused)
    code, output, error = programs.runner("train.py", train.main, monkeypatch, capsys)("--output-dir", "out")
    assert (code, output) == (2, "") and error.startswith(f"error: out/x: {os.strerror(number)}; ")
    assert error.count("\n") == 1
