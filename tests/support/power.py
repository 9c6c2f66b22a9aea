"""A power cut at every moment of a program: what its files may be afterwards.

A file system keeps names and contents in memory until a program has it write them down (fsync) or half a minute has
passed, and writes them in an order of its own. So each directory is afterwards as it was at its last fsync, or as the
program saw it; each file has what it had at its last fsync (nothing, if there was none), or what the program saw.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Tree = dict[str, str | None]
"""digest of the content by path relative to the root; None: a directory"""
CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


class Disk:
    """The files below `root`, watched while a program of this process writes them.

    `states`: each (what the program had promised by then, the files after a power cut), every one once.
    """

    def __init__(self, root: Path, promised: Any) -> None:
        self.root, self.promised = root, promised
        self.states: list[tuple[Any, Tree]] = []
        self._known: set[int] = set()
        self._blobs = {"": b""}
        self._held: dict[int, int] = {}  # open files: no inode number is used twice
        self._directories: set[int] = set()
        self._digests: dict[int, tuple[tuple[int, int], str]] = {}  # of contents: (size, time of change), digest
        self._top = self._hold(str(root))
        self._names: dict[int, dict[str, int]] = {self._top: {}}  # of each directory at its last fsync
        self._contents: dict[int, str] = {}  # of each file at its last fsync

    @contextlib.contextmanager
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, self._followed(name, getattr(os, name)))
            yield
            self.note()
        for number in self._held.values():
            os.close(number)

    def _followed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            self.note(os.fstat(arguments[0]).st_ino if name == "fsync" else None)
            return result

        return called

    def note(self, flushed: int | None = None) -> None:
        """Every state that a power cut at this moment may leave, with that inode just written down."""
        names, contents = self._current()
        if flushed in names:
            self._names[flushed] = names[flushed]
        elif flushed in contents:
            self._contents[flushed] = contents[flushed]
        self._add(names, contents)  # nothing is lost: as after SIGKILL
        for lost in (set(names), set(), *({one} for one in names), *(set(names) - {one} for one in names)):
            self._add({inode: self._names.get(inode, {}) if inode in lost else now for inode, now in names.items()})

    def _add(self, names: dict[int, dict[str, int]], contents: dict[int, str] | None = None) -> None:
        names, contents = self._names | names, self._contents if contents is None else contents
        tree: Tree = {}
        waiting = [("", self._top)]
        while waiting:
            path, inode = waiting.pop()
            if inode in self._directories:
                tree[path] = None
                waiting += [(os.path.join(path, name), child) for name, child in names.get(inode, {}).items()]
            else:
                tree[path] = contents.get(inode, "")
        key = hash((self.promised, frozenset(tree.items())))
        if key not in self._known:
            self._known.add(key)
            self.states.append((self.promised, tree))

    def _current(self) -> tuple[dict[int, dict[str, int]], dict[int, str]]:
        """What the program sees: the inodes by name in every directory, a digest of every file's content."""
        names: dict[int, dict[str, int]] = {}
        contents: dict[int, str] = {}
        waiting = [str(self.root)]
        while waiting:
            folder = waiting.pop()
            entries = list(os.scandir(folder))
            inode = self._hold(folder)
            self._directories.add(inode)
            names[inode] = {entry.name: self._hold(entry.path) for entry in entries}
            waiting += [entry.path for entry in entries if entry.is_dir()]
            contents |= {names[inode][entry.name]: self._content(entry) for entry in entries if entry.is_file()}
        return names, contents

    def _content(self, entry: os.DirEntry[str]) -> str:
        status = entry.stat()
        changed = (status.st_size, status.st_mtime_ns)
        if self._digests.get(status.st_ino, (None,))[0] != changed:
            content = Path(entry.path).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            self._blobs[digest] = content
            self._digests[status.st_ino] = (changed, digest)
        return self._digests[status.st_ino][1]

    def _hold(self, path: str) -> int:
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def lay_out(self, tree: Tree, root: Path) -> None:
        """Make `root` hold exactly these files."""
        shutil.rmtree(root, ignore_errors=True)
        for path, digest in sorted(tree.items()):
            if digest is None:
                (root / path).mkdir(parents=True)
            else:
                (root / path).write_bytes(self._blobs[digest])
