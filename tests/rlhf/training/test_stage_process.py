"""The process of one stage: its command line, its last line, and who says it."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils import deterministic

from rlhf import plugins
from rlhf.config.declaration import Declaration
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.launch.supervisor import REQUEUE
from rlhf.training import random_sources, stage_process
from tests.support import forked

ROOT = Path(__file__).parents[3]


def stage_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, *argv: str) -> RunOptions:
    options_of_runs: list[RunOptions] = []

    def run(options: RunOptions) -> None:
        options_of_runs.append(options)
        if error is not None:
            raise error

    words = ["--output-dir", str(tmp_path / "out"), *argv]
    assert stage_process.stage_main(words, Declaration("x", "", {}, ()), lambda _: RunOptions, run) == 0
    return options_of_runs[0]


def test_between_stages_usr1_asks_to_be_started_again() -> None:
    with pytest.raises(SystemExit) as ended, stage_process.requeue_on_signal(), plugins.CatchUserCode():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)
    assert ended.value.code == REQUEUE
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("chosen", [False, True])
def test_cublas_hears_of_determinism_before_cuda_starts(
    chosen: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"})
    assert stage_main(monkeypatch, tmp_path, None, *["--deterministic"] * chosen).deterministic == chosen
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if chosen else None)


@pytest.mark.parametrize(
    ("device", "chosen", "expected"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_only_a_gpu_needs_deterministic_algorithms(
    device: str, chosen: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the option is accepted, and changes nothing."""
    monkeypatch.setattr(collectives, "local_device", lambda: torch.device(device))
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    try:
        random_sources.begin(RunOptions(deterministic=chosen, seed=3))
        assert torch.are_deterministic_algorithms_enabled() == expected
        assert deterministic.fill_uninitialized_memory != expected and torch.initial_seed() == 3
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_is_one_line_and_rank_0_says_it_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        stage_main(monkeypatch, tmp_path, UserError("a: got b, expected c"))
    assert ended.value.code == 2 and capsys.readouterr().err == "error: a: got b, expected c\n"
    assert waited == ([] if rank == "0" else [stage_process.PATIENCE_S])
    assert "error: a: got b, expected c" in (tmp_path / "error.json").read_text()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rank", "error", "waits"),
    [
        ("0", ZeroDivisionError("ours"), []),
        ("1", ZeroDivisionError("ours"), [5.0]),
        ("0", RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:5"), [10.0]),
        ("1", RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:5"), [10.0]),
    ],
)
def test_who_lost_its_peer_lets_the_peer_speak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, error: Exception, waits: list[float]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(type(error)):
        stage_main(monkeypatch, tmp_path, error)
    assert waited == waits, "the peer that has the message waits 5 s, too, and then the launcher ends both"


def test_no_garbage_is_collected_while_libraries_are_imported() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(ImportError), stage_process.fast_imports():
                assert not gc.isenabled()
                raise ImportError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


LIBGOMP = next((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"), None)


@pytest.mark.skipif(LIBGOMP is None, reason="this build of torch has no libgomp")
@pytest.mark.parametrize("chosen", [None, "77"])
def test_waiting_threads_sleep_soon(chosen: str | None) -> None:
    """libgomp itself says with which settings it was loaded."""
    program = (
        "import ctypes\nfrom rlhf.training.stage_process import fast_imports\n"
        f"with fast_imports():\n    ctypes.CDLL({str(LIBGOMP)!r})"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({"GOMP_SPINCOUNT": chosen} if chosen else {})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0 and f"GOMP_SPINCOUNT = '{chosen or stage_process.SPINS}'" in done.stderr


def test_torchrun_shows_the_mistake_first_and_last(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = forked.python(*torchrun, "-m", "step1_sft", "--modle", "x", "--output-dir", str(tmp_path / "out"), cwd=ROOT)
    lines = [line for line in done.stderr.splitlines() if line.strip("=-")]
    message = "error: no option '--modle' (did you mean '--model'?); see --help"
    assert done.returncode != 0 and done.stdout == ""
    assert [line for line in lines if line.startswith("error:")] == [message]
    assert lines[-1].endswith(message)
