"""Comparison of contenders, which run in separate processes and take turns.

A contender is `python -m benchmarks.NAME --contender WHO SETTINGS.json`. It loads and reports that it is ready. Then it
does one piece of work for each line that it reads, and answers with a line of JSON; between them it sleeps in a read.
So our code and the peer alternate, A B A B, under the same temperature and load of the machine, and their times are
compared in pairs. Imports and loading are measured separately as start-up; the first piece of work is a warm-up.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks import peers
from rlhf.config import Config
from rlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = "warm-up"
OURS = "ours"
MACHINE = "machine"

Row = dict[str, Any]
"""a contender's measurements of one piece of work: seconds, counts, and `peak_bytes` so far"""
Rows = dict[str, dict[str, list[Row]]]
"""contender -> work -> rows"""


class Options(Config):
    """Options of all comparisons."""

    model: str = "models/smollm2-135m-instruct"
    """language model, as `make smollm2` leaves it"""
    data: str = "build/hh-rlhf/harmless-base.jsonl.gz"
    """file of HH-RLHF pairs, whose first rows are used"""
    threads: int = Field(2, ge=1)
    """threads of each contender"""
    repeats: int = Field(3, ge=1)
    """turns of each contender, without the warm-up"""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of both sides"""
    torch_compile: bool = True
    """ours: compile the layers, and a decode step as one graph, before the measurement"""
    only: tuple[str, ...] = ()
    """contenders to run; none: all"""
    output: str | None = None
    """JSON file to write; by default benchmarks/results/NAME.json, if all other options but --data are the defaults"""


# --- the contender's side


class WorkerPipe:
    """A contender's connection to the harness. Prints of libraries go to the log."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._baseline_bytes, self._sleeping_cpu_s = 0, 0.0

    def mark_baseline(self) -> None:
        """Record the memory after imports and before loading."""
        self._baseline_bytes = memory_bytes("VmRSS")

    def ready(self) -> None:
        """Report that everything is loaded."""
        self._send({"before_bytes": self._baseline_bytes, "ready_bytes": memory_bytes("VmRSS")})

    def next_request(self) -> str | None:
        """Sleep until the next piece of work is requested. None: there is no more."""
        start = time.process_time()
        line = sys.stdin.readline().strip()
        self._sleeping_cpu_s = time.process_time() - start
        return line or None

    def reply(self, **numbers: Any) -> None:
        """Report a finished piece of work. `sleeping_cpu_s`: processor time of this process while others worked."""
        self._send({**numbers, "peak_bytes": memory_bytes("VmHWM"), "sleeping_cpu_s": round(self._sleeping_cpu_s, 4)})

    def _send(self, numbers: Row) -> None:
        self._answers.write(json.dumps(numbers) + "\n")
        self._answers.flush()


def clock() -> float:
    """Seconds, once the device has done what was started: TRL's loops end while a GPU still works."""
    torch = sys.modules.get("torch")  # the harness itself does without it
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(call: Callable[[], object]) -> float:
    """What a call takes, until the device has done its work."""
    start = clock()
    call()
    return clock() - start


def memory_bytes(name: str) -> int:
    """VmRSS, VmHWM or another size of this process. ru_maxrss would include the memory of the parent process."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


@dataclass(frozen=True, slots=True)
class Program:
    """What a contender runs, and where."""

    run: Callable[[dict[str, Any], WorkerPipe], None]
    """its work, with the settings that both sides get"""
    release: str | None = None
    """of TRL, if it imports TRL"""
    python: Path = Path(sys.executable)
    """a contender without its interpreter is left out"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """of its environment"""


def run_contender(programs: Mapping[str, Program], argv: Sequence[str]) -> int:
    """Run one contender. argv: its name, and the file of its settings."""
    programs[argv[0]].run(json.loads(Path(argv[1]).read_text(encoding="utf-8")), WorkerPipe())
    return 0


# --- the harness's side


class Contender:
    """The process of a contender, seen from the harness.

    Raises: UserError, with the end of its log, if it ends before it has answered.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.name, self._log = name, folder / f"{re.sub(r'[^a-z0-9]+', '-', name)}.log"
        start = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True,
            )  # fmt: skip
        self.start = self._answer()
        self.start["start_up_s"] = time.perf_counter() - start

    def ask(self, work: str) -> Row:
        """Have one piece of work done. Returns its measurements."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(work + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            log_tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise UserError(f"contender '{self.name}' ended with code {code}: {log_tail}")
        answer: Row = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process; kill it if it has not ended after 30 s."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def thread_variables(threads: int) -> dict[str, str]:
    """Environment variables that set the number of a contender's threads.

    GNU OpenMP's threads sleep within milliseconds after their last work (`sleeping_cpu_s` shows it). Immediate sleep,
    OMP_WAIT_POLICY=PASSIVE, would cost both sides 0.1 ms per operation of two threads (measured 2026-11-20), twice as
    long as an addition of a million numbers.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    quiet = {"KMP_BLOCKTIME": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**dict.fromkeys(names, str(threads)), **quiet, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def select_contenders(programs: Mapping[str, Program], options: Options) -> dict[str, Program]:
    """The contenders of `--only`, or all that can run here; always with the machine.

    Raises: UserError for an unknown name.
    """
    known = {name: program for name, program in programs.items() if program.python.exists()}
    unknown = [name for name in options.only if name not in known]
    if unknown:
        raise UserError(f"--only {unknown[0]}: expected some of {', '.join(map(repr, known))}")
    return {name: program for name, program in known.items() if not options.only or name in (*options.only, MACHINE)}


@contextlib.contextmanager
def start_contenders(
    module: str, programs: Mapping[str, Program], settings: dict[str, Any], threads: int, folder: Path
) -> Iterator[dict[str, Contender]]:
    """Start the contenders of `module` one after the other.

    Raises: UserError if a release of TRL cannot be installed, or if a contender ends.
    """
    peer_variables = {
        name: {} if program.release is None else peers.environment(program.release)
        for name, program in programs.items()
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    running: dict[str, Contender] = {}
    try:
        for name, program in programs.items():
            command = [str(program.python), "-m", module, "--contender", name, str(path)]
            variables = {**thread_variables(threads), **peer_variables[name], **program.variables}
            running[name] = Contender(name, command, variables, folder)
            print(f"{name}: ready in {running[name].start['start_up_s']:.1f} s", flush=True)
        yield running
    finally:
        for contender in running.values():
            contender.close()


def alternate(contenders: Mapping[str, Contender], repeats: int, works: Sequence[str] = ("all",)) -> Rows:
    """Every contender's rows: a warm-up, kept under its name, then each kind of work in turn, A B A B."""
    rows: Rows = {name: {work: [] for work in (WARM_UP, *works)} for name in contenders}
    turns = [(WARM_UP, 0), *((work, i + 1) for i in range(repeats) for work in works)]
    for work, number in turns:
        for name, contender in contenders.items():
            row = contender.ask(work)
            rows[name][work].append(row)
            numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
            print(f"{work} {number} {name}: " + " ".join(f"{k} {v:.6g}" for k, v in numbers.items()), flush=True)
    return rows
