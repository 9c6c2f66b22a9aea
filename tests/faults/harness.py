"""Runs of the real programs, in real processes, with a fault on the way; and what must be left afterwards.

Every process of a run has RLHF_TEST_ID in its environment, by which it is found wherever it went.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.support.demo import SMALL
from tests.support.processes import until

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
MARK = "RLHF_TEST_ID"
LIMIT_S = 600.0
"""in which every run must have ended by itself, on a busy machine"""
PROMPT_S = 60.0
"""in which it must have ended after a fault that it does not survive"""
GONE_S = 15.0
"""in which the last of its processes must be gone when the first is"""
STAGES = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}
KILLED = -signal.SIGKILL
Whole = Callable[[int, int], Path]

BATCH = {"batch_size": 32, "micro_batch_size": 32}
WORLD: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in BATCH},
    "actor_model": "demo-llama",
    "reward_model": "demo-llama",
    "data_path": ["demo,rows=700"],
    "save_every": 2,
    "sft": {"batch_size": 16, "micro_batch_size": 8, "learning_rate": 3e-3, "num_train_epochs": 1},
    "reward": {**BATCH, "learning_rate": 2e-3, "num_train_epochs": 1, "zero_stage": 3},
    "ppo": {
        **BATCH,
        "response_length": 8,
        "total_episodes": 160,
        "num_ppo_epochs": 1,
        "num_mini_batches": 2,
        "eval_samples": 8,
        "learning_rate": 5e-4,
        "critic_learning_rate": 1e-3,
        "ema_decay": 0.9,
        "use_score_scaling": True,
        "eval_every": 3,
        "keep_best": "eval_score",
    },
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. `output`: all it printed; `seconds`: from its start; `after`: from its last fault."""

    code: int
    output: str
    seconds: float
    after: float
    out: Path

    @property
    def last_line(self) -> str:
        return [line for line in self.output.splitlines() if line.strip()][-1]

    def require(self, code: int, *words: str) -> "Ended":
        """The exit code and words of its output."""
        assert self.code == code, f"exit code {self.code}, expected {code}:\n{self.output[-4000:]}"
        for word in words:
            assert word in self.output, f"{word!r} is not in:\n{self.output[-4000:]}"
        return self


class Running:
    """A run that may still be going on."""

    def __init__(self, out: Path, command: Sequence[str], fault: str) -> None:
        self.out, self.command, self.id = out, list(command), uuid.uuid4().hex
        self._log = out.with_name(f"{out.name}-{self.id}.log")
        paths = os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {MARK: self.id, "FAULT": fault, "PYTHONPATH": paths}
        self._start = time.time()
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: int) -> None:
        """As a terminal does: to the launcher and its process group."""
        os.killpg(self.process.pid, number)

    def reached(self, times: int = 1) -> None:
        """Wait for so many faults."""
        until(lambda: self.output().count("\nfault ") >= times or self.process.poll() is not None, LIMIT_S)
        assert self.process.poll() is None, self.output()[-4000:]

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        code = self.process.wait(limit_s)
        end = time.time()
        deadline = end + GONE_S
        while processes(self.id) and time.time() < deadline:
            time.sleep(0.05)
        times = [float(stamp) for stamp in re.findall(r"^fault \S+ at (\S+)$", self.output(), re.MULTILINE)]
        return Ended(code, self.output(), end - self._start, end - max(times, default=end), self.out)


@contextlib.contextmanager
def running(out: Path, command: Sequence[str], fault: str = "") -> Iterator[Running]:
    """A run that is over with the block, whatever happened."""
    run = Running(out, command, fault)
    try:
        yield run
        run.wait()
    finally:
        left = processes(run.id)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
    assert not left, f"still there: {list(left.values())}\n{run.output()[-4000:]}"


def run(out: Path, command: Sequence[str], fault: str = "", limit_s: float = LIMIT_S) -> Ended:
    """A run to its end; it leaves no process behind."""
    with running(out, command, fault) as started:
        ended = started.wait(limit_s)
    happened = ended.output.count("\nfault ")
    assert bool(happened) == bool(fault), f"{happened} faults happened, asked for: {fault!r}\n{ended.output[-4000:]}"
    return ended


def processes(mark: str) -> dict[int, str]:
    """Command lines by id, of processes of the run `mark` that are no zombies."""
    command_lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command_lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return command_lines


def world(folder: Path) -> Path:
    """The file of options."""
    path = folder / "world.yaml"
    path.write_text(yaml.safe_dump(WORLD), encoding="utf-8")
    return path


def chain(out: Path, *argv: str, processes: int = 1) -> list[str]:
    """The command line of the chain, or with --steps of a part of it."""
    node = ["--deployment-type", "single_node", "--num-processes", str(processes)] if processes > 1 else []
    options = ["--config", str(world(out.parent)), "--output-dir", str(out)]
    return [sys.executable, "train.py", *options, *node, *argv]


def alone(out: Path, whole: Path, step: int) -> list[str]:
    """The command line of a stage by itself, with the options it had in the run `whole`."""
    stage = STAGES[step]
    return [sys.executable, "-m", stage, "--config", str(whole / stage / "config.yaml"), "--output-dir", str(out)]


def printed_command(ended: Ended) -> list[str]:
    """What the line before the last one says to type."""
    return shlex.split(ended.output.splitlines()[-2].removeprefix("to resume: "))


def after_stages(whole: Path, out: Path, step: int) -> Path:
    """A directory in which the stages before `step` are finished, as in the run `whole`."""
    out.mkdir()
    for earlier in range(1, step):
        shutil.copytree(whole / STAGES[earlier], out / STAGES[earlier])
    return out


def rows(out: Path, step: int) -> list[dict[str, Any]]:
    text = (out / STAGES[step] / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def last_step(out: Path, step: int) -> int:
    return max((row["step"] for row in rows(out, step) if row["kind"] == "train"), default=0)


def saved_steps(out: Path, step: int) -> list[int]:
    """Those of the checkpoints that have a manifest."""
    manifests = (out / STAGES[step] / "checkpoints").glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in manifests)


def assert_same(out: Path, whole: Path, *steps: int) -> None:
    """Every tensor and every number of the finished stages equal, times aside; and nothing of the interruption left."""
    for step in steps:
        one, other = out / STAGES[step], whole / STAGES[step]
        assert files(one) == files(other)
        for name in files(one):
            if name.endswith(".safetensors"):
                assert_same_tensors(one / name, other / name)
                assert (one / name).read_bytes() == (other / name).read_bytes(), name
            elif name.endswith(".jsonl"):
                assert [without_times(row) for row in lines(one / name)] == [
                    without_times(row) for row in lines(other / name)
                ], name
        for name in ("metrics", "files", "models", "world_size"):
            assert manifest(one)[name] == manifest(other)[name], name
        if (one / "state.json").exists():
            assert (one / "state.json").read_text() == (other / "state.json").read_text()


def assert_same_tensors(one: Path, other: Path) -> None:
    tensors, expected = load_file(one), load_file(other)
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), f"{one}: {name} is {(tensors[name] - tensor).abs().max()} away"


def files(stage: Path) -> list[str]:
    """All but the lock's file, which holds nothing when no process has it."""
    return sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file() and path.name != ".lock")


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def manifest(stage: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((stage / "manifest.json").read_text(encoding="utf-8"))
    return content


def without_times(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {
        name: value
        for name, value in row.items()
        if not re.match(r"(forward_)?seconds|tokens_per_second|peak_memory", name)
    }
