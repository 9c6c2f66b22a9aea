"""Which ends of a stage are a crash, and with --max-restarts start it again, with which options.

A real kill: faults/test_kills.py.
"""

from pathlib import Path

import pytest
import yaml

from rlhf.chain import command as train
from rlhf.chain.options import ChainConfig
from rlhf.launch.supervisor import ExitStatus
from rlhf.storage import disk
from step1_sft.config import SFTConfig

CRASH, STOPPED = ExitStatus(-9, "rank 1: SIGKILL", crashed=True), ExitStatus(143, "SIGTERM")


@pytest.mark.parametrize(
    ("restarts", "ends", "runs", "code"),
    [
        (0, [CRASH], 1, -9),
        (2, [CRASH, ExitStatus(0)], 2, 0),
        (2, [CRASH, CRASH, CRASH], 3, -9),
        (2, [CRASH, STOPPED], 2, 143),
        (2, [ExitStatus(2)], 1, 2),
        (2, [ExitStatus(3)], 1, 3),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_a_crash_starts_the_stage_again_and_nothing_else_does(
    restarts: int, ends: list[ExitStatus], runs: int, code: int, finished: bool, tmp_path: Path
) -> None:
    """--overwrite is for once: after the old result is gone it would remove the checkpoints of the run."""
    manifest = tmp_path / "step1_sft" / "manifest.json"
    manifest.parent.mkdir()
    if finished:
        manifest.touch()
    overwrites = []

    def run(module: str, argv: list[str]) -> ExitStatus:
        overwrites.append(yaml.safe_load(Path(argv[1]).read_text())["overwrite"])
        ended = ends[len(overwrites) - 1]
        if ended == 0:
            disk.write_text(manifest, "new")
        return ended

    options = SFTConfig(output_dir=str(tmp_path), overwrite=True)
    assert train.run_with_restarts(1, options, run, restarts) == code
    assert overwrites == [True, *([finished] * (runs - 1))]


def test_a_crash_after_the_end_keeps_the_new_result(tmp_path: Path) -> None:
    manifest = tmp_path / "step1_sft" / "manifest.json"
    manifest.parent.mkdir()
    manifest.touch()
    overwrites = []

    def run(module: str, argv: list[str]) -> ExitStatus:
        overwrites.append(yaml.safe_load(Path(argv[1]).read_text())["overwrite"])
        if len(overwrites) == 1:
            disk.write_text(manifest, "new")
            return CRASH
        return ExitStatus(0)  # the stage is complete and skipped

    assert train.run_with_restarts(1, SFTConfig(output_dir=str(tmp_path), overwrite=True), run, 1) == 0
    assert overwrites == [True, False]


@pytest.mark.parametrize("finished", [False, True])
def test_a_stage_that_ends_without_its_manifest_has_failed(
    finished: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after os._exit(0) in a reward function. An old manifest, which --overwrite replaces, does not count."""
    manifest = tmp_path / "step1_sft" / "manifest.json"
    manifest.parent.mkdir()
    if finished:
        manifest.touch()
    options = SFTConfig(output_dir=str(tmp_path), overwrite=finished)
    ended = train.run_with_restarts(1, options, lambda *_: ExitStatus(0), 1)
    assert capsys.readouterr().err.endswith("; restart 1 of 1\n")
    with pytest.raises(SystemExit) as leaving:
        train.exit_with_failure(ChainConfig(), 1, ended, {1: options})
    assert leaving.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        "step1_sft did not finish: exit code 0 without a manifest.json (look for sys.exit and os._exit in your reward "
        "function and other files of your own), before its first step; it starts from scratch, without a checkpoint"
    )
