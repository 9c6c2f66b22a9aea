"""Trackers: `Config` and `build(config)`, which returns a `Tracker`. Those of accelerate are in `_table`.

A tracker gets what metrics.jsonl has, and samples as tables. Only rank 0 has trackers. One that raises an exception is
left out for the rest of the run (rlhf.training.reporting).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf import plugins
from rlhf.errors import UserError

FOLDER = __name__
VERDICT = "verdict"
"""the name of the text with the result of a stage"""
Scalar = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run of one stage, for a tracker."""

    project: str
    """name of the directory of the whole run"""
    stage: str
    directory: Path
    """directory of the stage"""
    done: int
    """steps (of a stage with rollouts: iterations) at the checkpoint from which the run continues; 0: from none"""
    run_id: str | None
    """what `start` returned in the part of the run that is continued; None: a new run"""


class Tracker(Protocol):
    """What the pipeline requires of a tracker. `start` is the first call, `finish` the last."""

    rewinds: bool = False
    """optional; True: `start` deletes what the tracker has of steps after `run.done`, so that a resumed run sends these
    steps again. Otherwise a resumed run does not send a step twice"""

    def start(self, run: TrackedRun) -> str:
        """Begin, or continue the run `run.run_id`; the id with which a later call continues this run."""

    def log_config(self, config: Mapping[str, Scalar]) -> None:
        """The options of the stage, without secrets; nested ones as `critic.zero_stage`. Called once in a new run."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers after `step` steps, named `train/...` or, on held-out rows, `eval/...`. They may be non-finite."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """A warning of the run, named `warning/...`, or at its end the result in words, named VERDICT. Both are also
        alerts of a service that has alerts."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        """Responses to held-out prompts, one a row."""

    def finish(self) -> None:
        """The run ends: well, with an error, or to be resumed later."""


def open_tracker(spec: str) -> Tracker:
    """The tracker that `spec` names, with every member of the contract, not started.

    Raises: UserError for an unknown name or option, a package that is not installed, or a missing member.
    """
    tracker: Tracker = plugins.build(FOLDER, spec)
    return plugins.conforming(tracker, Tracker, spec)


def check_trackers(specs: Sequence[str]) -> None:
    """Raises: UserError as of `open_tracker`."""
    for spec in specs:
        try:
            open_tracker(spec)
        except UserError as error:
            raise UserError(f"--report-to {spec}: {error}") from None
