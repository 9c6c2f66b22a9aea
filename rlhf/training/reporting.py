"""What a run sends to its trackers, on rank 0. No tracker can end a run, and a resumed run sends each step once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import console, plugins
from rlhf.config.options import RunOptions
from rlhf.config.parser import leaves
from rlhf.config.secrets import masked
from rlhf.storage import disk
from rlhf.training.trackers import VERDICT, Scalar, TrackedRun, Tracker, open_tracker
from rlhf.types import Metrics

RUN_IDS = "trackers.json"
"""The file of a stage with the id of each tracker's run."""
Rows = frozenset[tuple[str, int]]
"""(kind, step) of rows of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class _OpenTracker:
    """A tracker that has not failed."""

    name: str
    tracker: Tracker
    sent: Rows
    """rows that the tracker has already, from before the run was resumed"""


class Reporter:
    """The trackers of one stage.

    A tracker is code of the user, or of a library that may raise anything when its server is down, full or refuses: any
    exception (plugins.CatchUserCode) is printed once, and the tracker is left out from there on.
    """

    def __init__(self, directory: Path, options: RunOptions, done: int = 0, recorded: Rows = frozenset()) -> None:
        """Start the trackers of `options.report_to`.

        done: steps at the checkpoint from which the run is resumed. recorded: rows after it, from before.
        """
        path = directory / RUN_IDS
        run_ids: dict[str, str] = disk.read_json(path) if done and path.is_file() else {}
        config: dict[str, Any] = {  # lists as JSON
            name: json.dumps(value) if isinstance(value, list) else value
            for name, value in leaves(masked(options.model_dump(mode="json")))
        }
        self.failures: list[str] = []
        self._open: list[_OpenTracker] = []
        for spec in options.report_to:
            name, _ = plugins.parse_spec(spec)
            run = TrackedRun(directory.resolve().parent.name, directory.name, directory, done, run_ids.get(name))
            tracker = open_tracker(spec)
            is_repeated = run.run_id is not None and not tracker.rewinds
            self._open.append(_OpenTracker(name, tracker, recorded if is_repeated else frozenset()))
            run_ids |= self._start(self._open[-1], run, config)
        if options.report_to:
            disk.write_json(path, run_ids)

    def _start(self, entry: _OpenTracker, run: TrackedRun, config: Mapping[str, Scalar]) -> dict[str, str]:
        """The id of the tracker's run by its name; nothing if it could not be started."""
        run_ids = {}

        def start(tracker: Tracker) -> None:
            run_id = tracker.start(run)
            if not isinstance(run_id, str):  # of the user's code: a file of JSON keeps it
                raise TypeError(f"start returned {type(run_id).__name__}, expected the id of the run as text")
            run_ids[entry.name] = run_id
            if run.run_id is None:
                tracker.log_config(config)

        self._call(entry, start)
        return run_ids

    def metrics(self, kind: str, step: int, metrics: Metrics) -> None:
        """Numbers of `kind`, train or eval."""
        named = {f"{kind}/{name}": float(value) for name, value in metrics.items()}
        self._send(kind, step, lambda tracker: tracker.log_metrics(named, step))

    def text(self, kind: str, step: int, name: str, text: str) -> None:
        self._send(kind, step, lambda tracker: tracker.log_text(f"{kind}/{name}", text, step))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Scalar]]) -> None:
        """Rows with the same columns. Of training step `step`, whose own row is recorded after it."""
        if rows:
            cells = [[*row.values()] for row in rows]
            self._send("train", step, lambda tracker: tracker.log_table(name, [*rows[0]], cells, step))

    def verdict(self, step: int, describe: Callable[[], str]) -> None:
        """The result of the stage in words, after its last step."""
        self._send("verdict", step, lambda tracker: tracker.log_text(VERDICT, describe(), step))

    def close(self) -> None:
        """End the trackers' runs. A second call does nothing."""
        for entry in tuple(self._open):
            self._call(entry, lambda tracker: tracker.finish())
        self._open = []

    def _send(self, kind: str, step: int, send: Callable[[Tracker], None]) -> None:
        for entry in tuple(self._open):
            if (kind, step) not in entry.sent:
                self._call(entry, send)

    def _call(self, entry: _OpenTracker, call: Callable[[Tracker], None]) -> None:
        with plugins.CatchUserCode() as caught:
            call(entry.tracker)
        if caught.error is not None:
            self._open.remove(entry)
            reason = plugins.error_location(caught.error)
            self.failures.append(f"tracker {entry.name} fails and is left out from here on ({reason})")
            console.say(f"warning: {self.failures[-1]}; metrics.jsonl has it all")


def rows_after(metrics_file: Path, done: int) -> Rows:
    """The rows of a metrics.jsonl of steps after `done`; a line that was cut off or is not of a run is no row."""
    return frozenset(
        (row["kind"], row["step"])
        for row in disk.json_lines(metrics_file)
        if row.get("kind") and row.get("step", 0) > done
    )
