"""The last lines of a chain that ends early: how to go on; then where it was, why, and what is kept. Torch-free."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf.launch import rank_variables
from rlhf.launch.supervisor import Ended


def last_words(stage: Path, ended: Ended, again: str) -> str:
    """Two lines about the stage in the directory `stage`: `again`, the command that goes on, and a short verdict."""
    step, kept = last_step(stage), newest_checkpoint(stage)
    where = f"at step {step}" if step else "before its first step"
    saved = f"goes on after step {int(kept.name[5:])}" if kept else "begins again, without a checkpoint"
    return f"to go on: {again}\n{stage.name} did not finish: {ended.cause}, {where}; it {saved}"


def last_step(stage: Path) -> int | None:
    """The last step in the stage's metrics.jsonl."""
    try:
        lines = (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # cut off by what ended the stage
            continue
        if row["kind"] == "train":
            return int(row["step"])
    return None


def newest_checkpoint(stage: Path) -> Path | None:
    """The one of the highest step that has a manifest; what it says is not checked."""
    found = sorted((stage / "checkpoints").glob("step-*/manifest.json"))
    return found[-1].parent if found else None


def command_again(overwritten: Mapping[str, Path]) -> str:
    """What the user typed, less --overwrite where the old result is gone already: that would begin from nothing.

    `overwritten`: the manifest of each stage that is to be made again, by the section of its options.
    """
    typed = rank_variables.without_local_rank(sys.orig_argv)
    words = [word for word in typed if not re.match(r"--(\w+\.)?overwrite(=|$)", word)]
    left = [f"--{section}.overwrite" for section, manifest in overwritten.items() if manifest.exists()]
    again = shlex.join([*words, *left])
    return again if rank_variables.world_size() == 1 else f"on every host, with the launcher that started it: {again}"
