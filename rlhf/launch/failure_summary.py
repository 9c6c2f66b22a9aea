"""How far a stage is, from its files, and the last lines of a chain that ends early: the command to resume, the cause,
and the checkpoint. Torch-free."""

import contextlib
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rlhf.launch import rank_variables
from rlhf.launch.supervisor import ExitStatus
from rlhf.storage import disk

HUNG = 5.0
"""a step hangs when nothing was written for so many times as long as the longest one took"""


def failure_summary(stage: Path, status: ExitStatus, command: str) -> str:
    """Two lines about the stage in the directory `stage`: the command to resume, and how the stage ended."""
    if (stage / "manifest.json").is_file() and not status.crashed:
        return f"to go on: {command}\n{stage.name} is finished; then {status.cause}"
    step, checkpoint = last_step(stage), newest_checkpoint(stage)
    position = f"at step {step}" if step else "before its first step"
    saved = (
        f"resumes after step {int(checkpoint.name[5:])}" if checkpoint else "starts from scratch, without a checkpoint"
    )
    return f"to resume: {command}\n{stage.name} did not finish: {status.cause}, {position}; it {saved}"


def has_unsaved_steps(stage: Path) -> bool:
    """Whether the stage in this directory has finished steps that are neither in a checkpoint nor in its result, and
    whose present step does not hang."""
    step, checkpoint = last_step(stage), newest_checkpoint(stage)
    saved = 0 if checkpoint is None else int(checkpoint.name[5:])
    return step is not None and step > saved and not (stage / "manifest.json").is_file() and not _hangs(stage)


def _hangs(stage: Path) -> bool:
    """Whether the stage has written nothing, neither rows nor files, for several times as long as its longest step."""
    times = [0.0, *(float(row.get("seconds", 0.0)) for row in disk.json_lines(stage / "metrics.jsonl"))]
    longest = max(after - before for before, after in pairwise(times))
    changes = [0.0]
    for path in stage.rglob("*"):
        with contextlib.suppress(OSError):  # of a checkpoint that is just removed
            changes.append(path.stat().st_mtime)
    return time.time() - max(changes) > HUNG * max(longest, 1.0)


def last_step(stage: Path) -> int | None:
    """The last step in the stage's metrics.jsonl."""
    rows = disk.json_lines(stage / "metrics.jsonl")
    return max((int(row["step"]) for row in rows if row.get("kind") == "train"), default=None)


def newest_checkpoint(stage: Path) -> Path | None:
    """The checkpoint of the highest step that has a manifest; it is not checked."""
    manifests = sorted((stage / "checkpoints").glob("step-*/manifest.json"))
    return manifests[-1].parent if manifests else None


def command_to_resume(typed: Sequence[str], overwritten: Mapping[str, Path]) -> str:
    """The user's command, without --overwrite for stages whose old result is already removed: it would start them from
    scratch.

    typed: its words; overwritten: the manifest of each stage that --overwrite replaces, by what its options begin with,
    as `ppo.`
    """
    words = [word for word in typed if not re.match(r"--((\w+\.)?overwrite(=|$)|local[-_]rank=)", word)]
    options = [f"--{prefix}overwrite" for prefix, manifest in overwritten.items() if manifest.exists()]
    return on_every_host([*words, *options])


def on_every_host(words: Sequence[str]) -> str:
    """A command for the user, whose launcher does not tell its own words to the processes that it starts."""
    launched = rank_variables.world_size() > 1
    return ("on every host, with the launcher that started it: " if launched else "") + shlex.join(words)
