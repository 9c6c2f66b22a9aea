"""A stage that is a fork of the process that starts it does what a new program does."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rlhf.launch import forks
from tests.support.processes import until

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
NEW = "torch" not in sys.modules
import atexit, json, pathlib, signal, threading, time
def facts(argv):
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
    files = [file for file in pathlib.Path("/proc/self/fd").iterdir() if file.exists()]
    return {
        "new": NEW,
        "argv": [len(argv), type(argv).__name__],
        "path": sys.path,
        "environment": {**os.environ, "RLHF_LAUNCHER_PID": ""},
        "handlers": [str(signal.getsignal(number)) for number in numbers],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "stdin": sys.stdin.read(),
        "leads": os.getsid(0) == os.getpid(),
        "lock": any(".lock" in str(file.readlink()) for file in files),
    }
def write(name, argv):
    (pathlib.Path(os.environ["HERE"]) / name).write_text(json.dumps(facts(argv)))
def main(argv):
    exec(argv[0], globals() | {"argv": argv})
    return 0
if __name__ == "__main__":
    main(sys.argv[1:])
"""
PARENT = """
import atexit, json, os, sys, threading
from pathlib import Path
from rlhf.launch import forks, launcher
from rlhf.storage import manifests
from rlhf.training.stage_process import fast_imports
with fast_imports():
    import torch
here, bodies = Path(sys.argv[1]), json.loads(sys.argv[2])
atexit.register(lambda: (here / f"parent-{os.getpid()}").touch())
codes = []
with manifests.locked(here / "run"):
    for body in bodies:
        sys.stdout.write("once ")
        codes.append(int(launcher.run("forked_program", [body])))
threading.Thread(target=threading.Event().wait, daemon=True).start()
codes.append(int(launcher.run("forked_program", ["write('new', argv)"])))
print()
print(json.dumps([os.getpid(), codes]))
"""
LINUX = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="forks only on Linux")


def write_program(folder: Path) -> None:
    (folder / "forked_program").mkdir()
    (folder / "forked_program" / "__main__.py").write_text(PROGRAM)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with torch saw of its children, and what the first of them saw of itself."""
    here = tmp_path_factory.mktemp("forks")
    write_program(here)
    bodies = [
        "write('forked', argv)",
        "sys.exit(7)",
        "sys.exit('a sentence')",
        "raise ValueError('a mistake')",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        f"atexit.register(pathlib.Path({str(here / 'child')!r}).touch)",
        f"threading.Thread(target=lambda: (time.sleep(0.2), pathlib.Path({str(here / 'thread')!r}).touch())).start()",
        "from rlhf.launch import forks; forks.THREADS_S = 0.2; threading.Thread(target=threading.Event().wait).start()",
    ]
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{ROOT}", "HERE": str(here)}
    command = [sys.executable, "-c", PARENT, str(here), json.dumps(bodies)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 0, done.stderr
    pid, codes = json.loads(done.stdout.splitlines()[-1])
    processes = {name: json.loads((here / name).read_text()) for name in ("forked", "new")}
    return {"here": here, "pid": pid, "codes": codes, "out": done.stdout, "err": done.stderr, **processes}


@LINUX
def test_a_fork_sees_what_a_new_program_sees(run: dict[str, Any]) -> None:
    assert (run["forked"].pop("new"), run["new"].pop("new")) == (False, True)
    assert run["forked"]["leads"]
    assert not run["forked"]["lock"]
    assert run["forked"] == run["new"]


@LINUX
def test_the_exit_codes_are_those_of_a_program(run: dict[str, Any]) -> None:
    assert run["codes"] == [0, 7, 1, 1, -9, -15, 0, 0, 0, 0]
    assert "a sentence\n" in run["err"]
    assert "ValueError: a mistake" in run["err"]


@LINUX
def test_nothing_of_the_parent_happens_twice(run: dict[str, Any]) -> None:
    """What is registered for the end runs in the process that registered it; buffered output is written once."""
    assert [path.name for path in run["here"].glob("parent-*")] == [f"parent-{run['pid']}"]
    assert run["out"].count("once ") == 9
    assert (run["here"] / "child").exists()
    assert (run["here"] / "thread").exists()


@LINUX
def test_no_fork_beside_a_gpu_or_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # as the chain has

    token = forks._of_imports.set(frozenset(forks._threads()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert forks.possible()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not forks.possible()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not forks.possible()
    finally:
        done.set()
        thread.join()
        forks._of_imports.reset(token)


@LINUX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_with_its_parent_and_its_own_children(number: int, tmp_path: Path) -> None:
    """SIGTERM is passed on; after SIGKILL the kernel tells the fork."""
    write_program(tmp_path)
    body = "import subprocess; from rlhf.training.stage_process import _end_with_launcher; _end_with_launcher()\n"
    body += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    body += f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(f'{{NEW}} {{os.getpid()}} {{child.pid}}')\n"
    body += f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'ready')!r}); time.sleep(99)"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), json.dumps([body])], env=env)
    try:
        until((tmp_path / "ready").exists)
        new, *pids = (tmp_path / "ready").read_text().split()
        assert new == "False"
        parent.send_signal(number)
        assert parent.wait(60) == (-number if number == signal.SIGKILL else 0)
    finally:
        parent.kill()
        parent.wait()
    gone = pids if number == signal.SIGTERM else pids[:1]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone))
    for pid in set(pids) - set(gone):
        os.kill(int(pid), signal.SIGKILL)
