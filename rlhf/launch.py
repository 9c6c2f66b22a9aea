"""Starting a stage: one process, or one per device through torchrun; the whole group ends with us."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

GRACE_S = 30
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def command(module: str, argv: Sequence[str], processes: int) -> list[str]:
    """The argument list that starts `processes` ranks of `python -m module`."""
    if processes == 1:
        return [sys.executable, "-m", module, *argv]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *torchrun, "-m", module, *argv]


def environment(processes: int) -> dict[str, str]:
    """Ours, with the project importable, the cores shared among CPU ranks, and no launcher's variables left over."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    root = str(Path(__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    if processes > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    return env


def run(module: str, argv: Sequence[str], processes: int) -> int:
    """Run a stage to its end in a session of its own; its exit code.

    SIGTERM, SIGINT and SIGUSR1 are passed on to every process of it; a second one, or no end within
    GRACE_S seconds, kills them. Nothing of it outlives this call.
    """
    child = subprocess.Popen(command(module, argv, processes), env=environment(processes), start_new_session=True)
    asked: list[float] = []

    def forward(number: int, _: FrameType | None) -> None:
        asked.append(time.monotonic())
        _signal_group(child.pid, number if len(asked) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        while True:
            try:
                return child.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if asked and time.monotonic() - asked[0] > GRACE_S:
                    _signal_group(child.pid, signal.SIGKILL)
    finally:
        _signal_group(child.pid, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
