"""A process that imports the large libraries once, and forks for every run of tests.

    python tests/mutation/worker.py MODULE ...

runs in a copy of the tree, of which it imports nothing itself. It reads tasks, one JSON object a line, and answers each
with a line of JSON. A task names the test files, a product file with the text it has meanwhile (or none), and the
seconds that the tests may take.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MEMORY_BYTES = 6 * 2**30
"""of tests in use: a mutant that allocates without end must not take the memory of others"""
OUTPUT = Path("build/tests.txt")
WHOLE = f"@{Path(__file__).resolve().parents[1] / 'whole.txt'}"
"""the arguments of pytest for what make test, make test-ranks and make test-compiled run together"""


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    OUTPUT.parent.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Run the tests of a task: `passed`, `failed` or `timed out`, the seconds, and the end of the output."""
    file = None if task["file"] is None else Path(task["file"])
    before, times = (file.read_bytes(), os.stat(file)) if file is not None else (b"", None)
    if file is not None:
        file.write_text(task["source"], encoding="utf-8")
    try:
        began = time.monotonic()
        outcome = _run(task["tests"], task["limit_s"], keep_bytecode=file is None)
        output = OUTPUT.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        return {"outcome": outcome, "seconds": time.monotonic() - began, "output": output}
    finally:
        if file is not None and times is not None:
            file.write_bytes(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that its compiled form is used again


def _run(tests: list[str], limit_s: float, keep_bytecode: bool) -> str:
    child = os.fork()
    if child == 0:
        _child(tests, keep_bytecode)
    end = time.monotonic() + limit_s
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return "passed" if status == 0 else "failed"
            if _memory(child) > MEMORY_BYTES:
                return "failed"
            time.sleep(0.02)
        return "timed out"
    finally:  # the tests and every process they started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _memory(process: int) -> int:
    """Bytes in use. A limit of the system's would count what is only reserved: DeepSpeed reserves much."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def _child(tests: list[str], keep_bytecode: bool) -> None:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if not keep_bytecode:  # a mutant's would be taken for that of the next one of equal size
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        # Rewritten assertions and plug-ins that no test asks for would take half of the time of a short file.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        quick = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--assert=plain", WHOLE]
        code = int(pytest.main([*quick, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
