"""The end of a run, whatever the stage: signals between its last step and its result, and steps that were skipped."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain.stages import STAGES
from rlhf.launch.supervisor import LAUNCHER, NON_FINITE, TERMINATED
from rlhf.storage import manifests
from rlhf.training.checkpoints import Resumable
from rlhf.training.run import open_run
from tests.support.killing import sft_options

STAGE = Path("out/step1_sft")
SKIPPED = {"learning_rate": 1e-3, "skipped": 1.0}
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


@pytest.mark.parametrize(
    "skipped",
    [SKIPPED, {"skipped_iteration": 1.0}, {"optimizer_steps": 4.0, "skipped_steps": 4.0}],
    ids=["step", "rollout", "updates"],
)
def test_a_run_that_learned_nothing_ends_with_code_3(
    skipped: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        run([skipped] * 3)
    assert leaving.value.code == NON_FINITE and not (STAGE / "manifest.json").exists()
    assert "all 3 steps were skipped (see the warnings), so nothing was learned" in capsys.readouterr().err


def test_one_good_step_is_enough() -> None:
    for good in (LEARNED, {"optimizer_steps": 4.0, "skipped_steps": 3.0}):
        run([SKIPPED, good, SKIPPED])
        manifests.read_manifest(STAGE)
        (STAGE / "manifest.json").unlink()


def test_a_manifest_is_json_whatever_was_measured() -> None:
    run([LEARNED], eval_score=float("nan"), eval_kl=float("inf"), eval_loss=0.1)
    manifest = json.loads((STAGE / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert manifest["metrics"] == {"eval_score": None, "eval_kl": None, "eval_loss": 0.1}
    manifests.read_manifest(STAGE)  # its checksum is that of what stands there


@pytest.mark.parametrize("launcher", [False, True])
def test_a_signal_after_the_last_step_waits_for_the_result(
    launcher: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation and the export come then, and the steps since the last checkpoint are in memory alone. A launcher
    names the signal itself: Ctrl-C reaches the stage as SIGTERM."""
    if launcher:
        monkeypatch.setenv(LAUNCHER, "1")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        run([LEARNED] * 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert leaving.value.code == TERMINATED and manifests.read_manifest(STAGE)
    cause = "stopped" if launcher else "SIGTERM"
    assert f"step1_sft: {cause} after the last step; the stage is finished" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
