"""Faults on demand in processes that a test starts with this folder on PYTHONPATH; Python imports this file by itself.

FAULT="[STAGE/]POINT:RANK:NTH:ACTION[:SECONDS]", several with commas between them: the action happens when that rank of
the stage comes to the point for the NTH time (`*`: each time). The product knows nothing of it.
"""

import errno
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

POINTS = {
    "step": ("rlhf.engine.training", "Engine.step", "before"),
    "forward": ("rlhf.engine.training", "Engine.__call__", "before"),
    "generate": ("step3_ppo.rollout", "generate", "before"),
    "write": ("rlhf.training.checkpoints", "write_file", "before"),
    "rename": ("rlhf.training.checkpoints", "os.rename", "before"),
    "renamed": ("rlhf.training.checkpoints", "os.rename", "after"),
    "load": ("rlhf.training.checkpoints", "Checkpoint.restore", "before"),
    "export": ("rlhf.training.run", "Run.save", "before"),
    "finished": ("rlhf.training.run", "Run.finish", "after"),
}
"""where a fault can happen: a module, something in it, and on which side of the call"""
MARK = "RLHF_TEST_ID"
SIGNALS = {"kill9": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1, "sigstop": signal.SIGSTOP}
TO_BE_HEARD_S = 0.5
"""after a signal to the launcher, so that it is passed on while this rank is still at the point"""


class Fault:
    def __init__(self, text: str) -> None:
        stage, _, rest = text.rpartition("/")
        point, self.rank, self.nth, self.action, *seconds = rest.split(":")
        self.text, self.stage, self.seconds = text, stage, float(seconds[0]) if seconds else 0.0
        self.module, self.target, self.side = POINTS[point]
        self.count = 0

    def arm(self, module: ModuleType) -> None:
        """Put ourselves in the way of the place."""
        owner: Any = module
        *path, name = self.target.split(".")
        for part in path:
            member = getattr(owner, part)
            if isinstance(member, ModuleType):  # a copy of its own, or everyone would be in the way
                member = SimpleNamespace(**vars(member))
                setattr(owner, part, member)
            owner = member
        setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if self.side == "before":
                self.happen()
            result = call(*args, **options)
            if self.side == "after":
                self.happen()
            return result

        return called

    def happen(self) -> None:
        here = stage()
        if not here.startswith("step") or self.stage not in ("", here) or os.environ.get("RANK", "0") != self.rank:
            return
        self.count += 1
        if self.nth not in ("*", str(self.count)):
            return
        print(f"\nfault {self.text} at {time.time()}", file=sys.stderr, flush=True)
        act(self.action, self.seconds)


def act(action: str, seconds: float) -> None:
    if action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[action])
    elif action.startswith("parent-"):
        os.kill(os.getppid(), SIGNALS[action.removeprefix("parent-")])
        time.sleep(TO_BE_HEARD_S)
    elif action == "killall":
        kill_all()
    elif action == "sleep":
        time.sleep(seconds)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif action == "oom":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    else:
        raise ArithmeticError("this was done on purpose")


def kill_all() -> None:
    """The launcher, every rank, and this one."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and int(folder.name) != os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Finder(importlib.abc.MetaPathFinder):
    """Arms the faults of a module as soon as it is there."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        mine = [fault for fault in self.faults if fault.module == name]
        spec = importlib.machinery.PathFinder.find_spec(name, path) if mine else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for fault in mine:
                fault.arm(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def stage() -> str:
    """What this process runs as `python -m`: the program of its start, or that of the fork that it is."""
    words = sys.orig_argv
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((name.removesuffix(".__main__") for name in sys.modules if name.endswith(".__main__")), "")


if os.environ.get("FAULT"):
    sys.meta_path.insert(0, Finder([Fault(text) for text in os.environ["FAULT"].split(",")]))
