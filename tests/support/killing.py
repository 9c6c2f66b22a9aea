"""All three stages, as small as they run, and processes that die in them: inside the test's own process.

A process that is killed runs no clean-up; here a BaseException, which nobody catches, stands for it. What it leaves in
the directory is the same, because the checkpoints have no clean-up that it would run.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf import plugins
from rlhf.storage import manifests
from rlhf.training import checkpoints, record
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING as sft
from step2_reward.config import RewardConfig
from step2_reward.stage import REWARD_MODELLING as reward
from step3_ppo import stage as ppo
from tests.support.demo import SMALL

STEPS = 4
"""optimizer steps of steps 1 and 2"""
TINY: dict[str, Any] = {
    **SMALL,
    "data_path": ["demo,rows=240"],
    "batch_size": 8,
    "micro_batch_size": 8,
    "max_eval_rows": 4,
    "max_length": 40,
    "output_dir": "out",
    "save_every": 1,
}
SHORT: dict[str, Any] = {"num_train_epochs": 1, "max_train_rows": 8 * STEPS, "model": "demo-llama"}
PPO: dict[str, Any] = {
    "response_length": 8,
    "total_episodes": 32,
    "eval_samples": 4,
    "num_ppo_epochs": 2,
    "learning_rate": 1e-3,
}
UNLIKE = {"save_every", "keep", "total_episodes"}
"""options of the runs below that differ without a difference in what they make"""
CLOCKS = ("seconds", "forward_seconds", "tokens_per_second", "peak_memory", "request", "cached_answers")
"""metrics that say what a process did, not what it made"""


class Killed(BaseException):
    """The end of the process."""


def sft_options(**changes: Any) -> SFTConfig:
    return SFTConfig(**{**TINY, **SHORT, "learning_rate": 1e-3, **changes})


def reward_options(**changes: Any) -> RewardConfig:
    return RewardConfig(**{**TINY, **SHORT, "learning_rate": 1e-3, **changes})


def ppo_options(algorithm: str = "ppo", **changes: Any) -> Any:
    options = {**TINY, **PPO, "algorithm": algorithm, **changes}
    return plugins.find("step3_ppo.algorithms", algorithm).Config(**options)


def run(options: Any) -> None:
    """The stage whose options they are."""
    stages: Mapping[type, Any] = {SFTConfig: sft, RewardConfig: reward}
    stages.get(type(options), ppo).run(options)


def dying(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], kind: str, step: int) -> None:
    """`run` with a process that dies right after it has recorded that step (kind train), or before its manifest (kind
    end)."""
    write = record.Recorder.write

    def no_digests(*_: object) -> None:
        raise Killed

    def last(self: record.Recorder, kind_now: str, step_now: int, metrics: Any) -> None:
        write(self, kind_now, step_now, metrics)
        if (kind_now, step_now) == (kind, step):
            raise Killed

    with monkeypatch.context() as patched:
        if kind == "end":
            patched.setattr(manifests, "file_digests", no_digests)
        patched.setattr(record.Recorder, "write", last)
        with pytest.raises(Killed):
            run()


def steps_of(stage: Path) -> list[int]:
    """The checkpoints that lie there."""
    return sorted(int(path.name[5:]) for path in (stage / checkpoints.CHECKPOINTS).glob("step-*"))


def left(stage: Path) -> dict[str, Any]:
    """What a finished stage has left, by file: content, times and UNLIKE aside."""
    files: dict[str, Any] = {}
    for path in sorted(path for path in stage.rglob("*") if path.is_file() and path.name != ".lock"):
        name = str(path.relative_to(stage))
        if name.startswith("tensorboard/"):  # has times, and repeated steps that only its reader leaves out
            continue
        if name == "metrics.jsonl":
            files[name] = [_timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        elif name == "manifest.json":
            manifest = json.loads(path.read_text(encoding="utf-8"))
            manifest["config"] = {key: value for key, value in manifest["config"].items() if key not in UNLIKE}
            del manifest["sha256"]  # of all of it
            files[name] = manifest
        elif name == "config.yaml":
            lines = path.read_text(encoding="utf-8").splitlines()
            files[name] = [line for line in lines if line.split(":")[0] not in UNLIKE]
        elif path.parent.name == "answers":  # in the order in which they came
            files[name] = sorted(path.read_bytes().splitlines())
        else:
            files[name] = path.read_bytes()
    return files


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(CLOCKS)}


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, content in one.items():
        assert content == other[name], name


def undisturbed(folder: Path, options: Any) -> dict[str, Any]:
    """What a run leaves that nothing happened to, and that wrote no checkpoints."""
    folder.mkdir()
    with contextlib.chdir(folder):
        run(options.model_copy(update={"save_every": None}))
        [stage] = Path("out").iterdir()
        return left(stage)
