"""Running tests on mutants: results that stay, and copies of the tree with a process in each."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant

IMPORTED = ("torch", "transformers", "datasets", "peft", "deepspeed", "pydantic")
"""libraries that a worker imports before it forks"""


class Results:
    """What is known of mutants: a line each, the newest counts."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        path.parent.mkdir(exist_ok=True)
        rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.by_name: dict[str, dict[str, Any]] = {row["name"]: row for row in map(json.loads, rows)}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a result."""
        with self._lock:
            self.by_name[row["name"]] = row
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def known(self, name: str, state: str) -> dict[str, Any] | None:
        """The result, unless the files have changed since."""
        row = self.by_name.get(name)
        return row if row is not None and row["state"] == state else None


class Worker:
    """A copy of the tree, and a process in it that runs tests."""

    def __init__(self, root: Path, folder: Path, modules: Sequence[str] = IMPORTED) -> None:
        """root: the tree, under git; folder: where the copy goes, and whatever tests write."""
        tree, temporary = folder / "tree", folder / "tmp"
        copy_tree(root, tree)
        temporary.mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "TMPDIR": str(temporary),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), *modules],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], limit_s: float, mutant: Mutant | None = None) -> dict[str, Any]:
        """The answer of the worker (see `worker.answer`)."""
        edit = {"file": None, "source": None} if mutant is None else {"file": mutant.file, "source": mutant.source}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"tests": list(tests), "limit_s": limit_s, **edit}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker has ended; its last words stand above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, and what it runs."""
        self._process.terminate()
        self._process.wait()


def copy_tree(root: Path, target: Path) -> None:
    """What git tracks or would, as it is now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in files:
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
