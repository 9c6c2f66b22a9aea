"""--max-restarts: which ends of a stage start it again, and with which options. A real kill: faults/test_kills.py."""

from pathlib import Path

import pytest
import yaml

from rlhf.chain import command as train
from rlhf.launch.supervisor import Ended
from step1_sft.config import SFTConfig

CRASH, STOPPED = Ended(-9, "rank 1: SIGKILL", crashed=True), Ended(143, "SIGTERM")


@pytest.mark.parametrize(
    ("restarts", "ends", "runs", "code"),
    [
        (0, [CRASH], 1, -9),
        (2, [CRASH, Ended(0)], 2, 0),
        (2, [CRASH, CRASH, CRASH], 3, -9),
        (2, [CRASH, STOPPED], 2, 143),
        (2, [Ended(2)], 1, 2),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_a_crash_starts_the_stage_again_and_nothing_else_does(
    restarts: int, ends: list[Ended], runs: int, code: int, finished: bool, tmp_path: Path
) -> None:
    """--overwrite is for once: after the old result is gone it would remove the checkpoints of the run."""
    (tmp_path / "step1_sft").mkdir()
    if finished:
        (tmp_path / "step1_sft" / "manifest.json").touch()
    overwrites = []

    def run(module: str, argv: list[str]) -> Ended:
        overwrites.append(yaml.safe_load(Path(argv[1]).read_text())["overwrite"])
        return ends[len(overwrites) - 1]

    options = SFTConfig(output_dir=str(tmp_path), overwrite=True)
    assert train.run_with_restarts(1, options, run, restarts) == code
    assert overwrites == [True, *([finished] * (runs - 1))]
