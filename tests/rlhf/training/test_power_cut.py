"""A power cut at every moment of a stage: afterwards it is finished and whole, or goes on from its last checkpoint."""

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf.roles import inputs
from rlhf.storage import manifests
from rlhf.training import checkpoints, logs, progress
from step1_sft.stage import FINE_TUNING as stage
from tests.support import power
from tests.support.killing import left, require_same, run, sft_options, undisturbed

SFT = Path("out/step1_sft")
STEPS = 3
OPTIONS = sft_options(max_train_rows=8 * STEPS)
FINISHED = STEPS + 1


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> power.Disk:
    """All that power cuts may leave of step 1, with what had been promised: the checkpoint of a step, or FINISHED."""
    root = tmp_path_factory.mktemp("disk")
    disk = power.Disk(root, promised=0)
    real = checkpoints.save

    def save(*arguments: Any) -> str | None:
        failure = real(*arguments)
        disk.promised = arguments[1]
        return failure

    with pytest.MonkeyPatch.context() as patched, contextlib.chdir(root):
        patched.setattr(checkpoints, "save", save)
        with disk.watched(patched):
            run(OPTIONS)
            disk.promised = FINISHED
    return disk


def standing() -> str:
    return progress.stage_status(
        stage.declaration, OPTIONS, inputs(stage.named_roles(OPTIONS)), partial(stage.content, OPTIONS), {}
    )


def logged() -> list[str]:
    """The kind of each row in the log, every line of it whole."""
    return [json.loads(line)["kind"] for line in (SFT / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_nothing_promised_is_lost(disk: power.Disk, here: Path) -> None:
    outcomes = set()
    for number, (promised, tree) in enumerate(disk.states):
        os.chdir(here)
        disk.lay_out(tree, here / "disk")
        os.chdir(here / "disk")
        outcomes.add((promised, standing()))
        if standing() == "finished":
            manifests.read_manifest(SFT)
            assert logged() == ["eval"] + ["train"] * STEPS + ["eval"], number
            continue
        checkpoint = checkpoints.newest(SFT)
        step = 0 if checkpoint is None else checkpoint.step
        assert promised <= step, f"state {number}: step {promised} was saved, step {step} is left"
        assert not step or logged()[: 1 + step] == ["eval"] + ["train"] * step, number
    for promised, what in ((0, "new"), (1, "interrupted"), (STEPS, "interrupted"), (STEPS, "finished")):
        assert (promised, what) in outcomes
    assert {what for promised, what in outcomes if promised == FINISHED} == {"finished"}


@pytest.mark.faults
def test_the_same_command_ends_with_the_same_bytes(disk: power.Disk, here: Path, tmp_path: Path) -> None:
    whole = undisturbed(here / "whole", OPTIONS)
    for _, tree in disk.states[::7]:
        os.chdir(here)
        disk.lay_out(tree, here / "disk")
        os.chdir(here / "disk")
        run(OPTIONS)
        require_same(left(SFT), whole)


def test_a_log_that_lost_rows_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = '{"step": 1}\n{"step": 2}\n'
    patterns = ("metrics.jsonl", "samples.jsonl", "chosen.jsonl", "rollouts-*.jsonl")
    for name in ("metrics.jsonl", "samples.jsonl", "chosen.jsonl"):
        (here / name).write_text(rows)
    known = logs.sizes(here, patterns)
    (here / "samples.jsonl").write_text(rows[:17])
    (here / "chosen.jsonl").unlink()
    (here / "metrics.jsonl").write_text(rows + rows)
    (here / "rollouts-0.jsonl").write_text(rows)
    logs.cut(here, patterns, known)
    assert capsys.readouterr().out.splitlines() == [
        f"warning: {here}/{name}: got {size} bytes, expected {len(rows)} of the checkpoint; its last rows are lost"
        for name, size in (("samples.jsonl", 17), ("chosen.jsonl", 0))
    ]
    assert (here / "metrics.jsonl").read_text() == rows
    assert (here / "samples.jsonl").read_text() == '{"step": 1}\n'
    assert not (here / "chosen.jsonl").exists() and not (here / "rollouts-0.jsonl").exists()
