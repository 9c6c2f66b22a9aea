"""The programs as Python functions: `from rlhf import sft, reward, ppo, train`.

A call writes its options to a file, runs `rlhf ppo --config FILE` in a process of its own, which starts the processes
of the stages, and returns when they have ended. So a call does what the command does: checks, checkpoints, several GPUs
or hosts. The same call again resumes an interrupted run, and returns at once after a finished one. Importing this
imports no torch.
"""

import inspect
import numbers
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import plugins
from rlhf.chain.options import SECTIONS
from rlhf.chain.stages import STAGES
from rlhf.config import Tree, parser
from rlhf.config.secrets import refuse_secrets
from rlhf.errors import MISTAKE_FILE, UserError
from rlhf.launch.launcher import rank_environment

DataPath = str | Path | Sequence[str | Path]


class RunError(RuntimeError):
    """A run that did not finish. `code` is the exit code of the command, which has printed why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}; the lines above say why")
        self.code = code


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished stage leaves."""

    directory: Path
    """OUT/step1_sft, OUT/step2_reward or OUT/step3_ppo"""
    model: Path
    """directory of the trained model, in step 3 of the actor; transformers loads it"""
    metrics: dict[str, float]
    """metrics of the last evaluation, as in manifest.json"""


def sft(*, model: str, data_path: DataPath, output_dir: str | Path, **options: object) -> Result:
    """Fine-tune a language model on responses (step 1).

    model: directory, hub id, short name or .yaml; data_path: as `--data-path`, one or a list
    options: those of `rlhf sft`, and of processes and hosts (`num_gpus=4`, `hostfile="hosts.txt"`)
    Raises: UserError for a mistake, RunError if the run ends early.
    """
    return _stage(1, output_dir, {"model": model, "data_path": data_path, **options})


def reward(*, model: str, data_path: DataPath, output_dir: str | Path, **options: object) -> Result:
    """Train a reward model on preferences (step 2). Arguments and errors as of `sft`."""
    return _stage(2, output_dir, {"model": model, "data_path": data_path, **options})


def ppo(
    *,
    data_path: DataPath,
    output_dir: str | Path,
    model: str | Path | None = None,
    reward_model: str | Path | None = None,
    **options: object,
) -> Result:
    """Train a policy by reinforcement learning (step 3). Arguments and errors as of `sft`.

    model: the policy to start from, by default the result of `sft` in output_dir
    reward_model: a trained reward model, by default the result of `reward` in output_dir
    reward, among the options: score sources; a function of a Python file or module may be passed itself
    """
    starts = {"actor_model": model, "reward_model": reward_model}
    chosen = {name: value for name, value in starts.items() if value is not None}
    return _stage(3, output_dir, {"data_path": data_path, **chosen, **options})


def train(*, actor_model: str, data_path: DataPath, output_dir: str | Path, **options: object) -> Result:
    """The whole chain, as `rlhf train`; returns the result of its last step.

    options: those of `rlhf train`; options of one stage as a mapping: `ppo={"kl_coef": 0.1}`
    """
    tree = {"actor_model": actor_model, "data_path": data_path, **options}
    plain = {name: _plain(value) for name, value in tree.items()}
    steps = plain.get("steps") or [*SECTIONS]
    return _run("train", Path(output_dir), plain, max(map(int, steps)) if isinstance(steps, list) else int(steps))


def _stage(step: int, output_dir: str | Path, options: Mapping[str, object]) -> Result:
    plain = {name: _plain(value) for name, value in options.items()}
    return _run(SECTIONS[step], Path(output_dir), plain, step)


def _run(verb: str, output_dir: Path, options: Tree, step: int) -> Result:
    """Run `rlhf VERB` with these options to its end. Raises: UserError, RunError."""
    if MISTAKE_FILE in os.environ:
        raise UserError(
            f"rlhf.{verb}: called by a file that a run has imported; put the call under `if __name__ == '__main__':`"
        )
    from rlhf.storage import disk, manifests

    refuse_secrets(options)
    directory = output_dir.expanduser().absolute()
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"call-{verb}.yaml"
    disk.write_text(file, parser.tree_to_yaml(options | {"output_dir": str(directory)}))
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as mistake:
        code = _call([sys.executable, "-P", "-m", "rlhf", verb, "--config", str(file)], mistake.name)
        if code == 2:
            raise UserError(mistake.read() or "the lines above say why")
    if code != 0:
        raise RunError(code)
    stage = directory / STAGES[step].name
    manifest = manifests.read_manifest(stage)
    return Result(stage, stage / STAGES[step].models[0], dict(manifest["metrics"]))


def _call(command: list[str], mistake: str) -> int:
    """Run a command, and return its exit code. mistake: the file for a user's mistake"""
    with subprocess.Popen(command, env=rank_environment(1) | {MISTAKE_FILE: mistake}) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()  # it saves a checkpoint and ends its stages
            raise


def _plain(value: object) -> Any:
    """A value as a YAML file has it: paths and functions by name."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # of numpy
        return value.item()
    return _function_name(value) if callable(value) else value


def _function_name(function: Callable[..., object]) -> str:
    """`my_reward.py:score` of a function. Raises: UserError for one that another process cannot import by its name."""
    name, written = getattr(function, "__qualname__", ""), inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(written)
    except TypeError:
        file = None
    # A wrapper has the name of what it wraps, which is not always what the file has under that name.
    is_there = getattr(written, "__globals__", {}).get(name) is function
    if not is_there or file is None or not Path(file).is_file():
        raise UserError(
            f"got the function {name or function!r}, which the processes of the run cannot import; expected a function "
            "at the top of a Python file: write it there, and pass it or its name, such as reward='my_reward.py:score'"
        )
    spec = f"{Path(file).absolute()}:{name}"
    return plugins.spec("python", function=spec) if re.search(r"[,*#'\"\[{]|: ", spec) else spec
