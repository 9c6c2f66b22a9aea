"""The end of a run, whatever the stage."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain.stages import STAGES
from rlhf.launch.supervisor import TERMINATED
from rlhf.storage import manifests
from rlhf.training.checkpoints import Resumable
from rlhf.training.run import open_run
from tests.support.killing import sft_options

STAGE = Path("out/step1_sft")
LEARNED = {"learning_rate": 1e-3, "skipped": 0.0, "loss": 1.0}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_LAUNCHER_PID", raising=False)


def run(steps: Sequence[dict[str, float]], end: Any = lambda: None, **result: float) -> None:
    """A stage that has no model: these steps, then `end`, then its result."""
    with open_run(STAGES[1], sft_options(save_every=None), "new", {}) as stage:
        stage.resume(Resumable({}, {}))
        stage.run_loop(steps, len(steps), ())
        end()
        stage.finish({}, result)


def test_a_signal_after_the_last_step_waits_for_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    """The evaluation and the export come then, and the steps since the last checkpoint are in memory alone."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        run([LEARNED] * 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert leaving.value.code == TERMINATED and manifests.read_manifest(STAGE)
    assert "step1_sft: SIGTERM after the last step; the stage is finished" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
