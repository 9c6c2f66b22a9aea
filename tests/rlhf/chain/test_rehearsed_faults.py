"""Faults that end or spoil the last hours of a run: a rehearsal finds each, here in the process of the test."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain import rehearsal
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.launch.supervisor import ExitStatus
from rlhf.report import write
from rlhf.text.tokenizer import load_tokenizer
from rlhf.training import run
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo import algorithms
from tests.rlhf.rewards.responses import reward_model
from tests.support import stages_here, tiny

SMALL: dict[str, Any] = {
    "data_path": ("demo,rows=400",), "chat_template": "human_assistant", "max_prompt_length": 24, "max_length": 48,
    "dtype": "fp32", "batch_size": 8, "output_dir": "out",
}  # fmt: skip
SAMPLING: dict[str, Any] = {"total_episodes": 80, "response_length": 4, "actor_model": "demo-llama"}


def options_of(step: int, algorithm: str = "rloo", **changes: Any) -> Any:
    """The options of a stage alone."""
    if step == 3:
        own = SAMPLING | {"reward": ("length,target=4",), "algorithm": algorithm}
        return algorithms.options(algorithm)(**SMALL | own | changes)
    return {1: SFTConfig, 2: RewardConfig}[step](**SMALL | {"model": "demo-llama"} | changes)


def run_here(todo: dict[int, Any]) -> tuple[int, ExitStatus] | None:
    """In place of `rlhf.chain.command.run_all`."""
    for step, options in todo.items():
        try:
            stages_here.run_stage(step, options, None)
        except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            return step, ExitStatus(1, str(error))
    return None


TRACKER = """
from rlhf.config import Config

class Mine:
    def start(self, run): return "id"
    def log_config(self, config): pass
    def log_metrics(self, metrics, step): pass
    def log_text(self, name, text, step): pass
    def log_table(self, name, columns, rows, step): pass
    def finish(self): import a_package_for_uploads

def build(config): return Mine()
"""
EIGHTS = "def score(prompts, responses): return [1.0 + i % 3 for i in range(len(responses) // 8 * 8)]"
JUDGE = """
calls = 0

def score(prompts, responses):
    global calls
    calls += 1
    return [float("nan") if calls > 1 else 1.0] * len(responses)
"""
ALGORITHM = """
import torch
from step3_ppo.algorithms import rloo

class Config(rloo.Config):
    pass

class Mine(rloo.RLOO):
    def policy_loss(self, logprobs, *others):
        loss, metrics = super().policy_loss(logprobs, *others)
        return loss, metrics | {"kind": logprobs.detach().mean()}

def build(config): return Mine(config)
"""
ADAPTER = """
from peft import LoraConfig
from rlhf.adapters.lora import LoRA
from rlhf.config import Config

class Mine(LoRA):
    FAULT

def build(config): return Mine(LoraConfig(r=2, target_modules="all-linear"))
"""
UNLOADABLE = """
    def merged(self, model, state):
        return {name: weight.flatten() for name, weight in super().merged(model, state).items()}
"""
DATA = """
import itertools
from rlhf.config import Config
from rlhf.types import Message, Row

calls = itertools.count()

class Mine:
    def rows(self, phase):
        call = next(calls)
        for i in range(200):
            yield Row((Message("user", f"tell me about the fox {i}"),), response=f"kind dog {call}")

def build(config, path): return Mine()
"""
OBJECTIVE = """
from rlhf.config import Config

class Mine:
    def loss(self, pairs, count):
        return -(pairs.chosen - pairs.rejected).view(2, 4).sigmoid().log().sum() / count, {}

def build(config): return Mine()
"""
PROMPTS_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('no answers') }}{% endif %}"
    "{{ m['content'] }} {% endfor %}"
)
Prepare = Callable[[Path, pytest.MonkeyPatch], object]


def scorer_of_prompts(folder: Path, _: pytest.MonkeyPatch) -> None:
    """A reward model of other ids than the policy's, whose template fails for a response."""
    words = {*load_tokenizer(resolve("demo-llama")).get_vocab()} - {"<pad>", "<s>", "</s>", "<unk>"}
    theirs = tiny.tokenizer(sorted(words), reverse=True)
    theirs.chat_template = PROMPTS_ONLY
    reward_model(folder / "scorer", theirs, "llama", pad_token_id=theirs.pad_token_id)


def failing(module: Any, name: str) -> Prepare:
    def fail(*_: Any) -> None:
        raise KeyError("licence")

    return lambda _, monkeypatch: monkeypatch.setattr(module, name, fail)


@dataclass(frozen=True)
class Fault:
    step: int
    options: dict[str, Any]
    text: str
    """of the user's file"""
    found: str
    """the words that name it"""
    prepare: Prepare = lambda folder, monkeypatch: None


ADAPTED, SCORED = {"adapter": "mine.py"}, {"reward": ("learned",), "reward_model": "scorer"}
FAULTS = {
    "a tracker without a package at its end": Fault(
        1, {"report_to": ("mine.py",)}, TRACKER, "tracker mine.py fails .* No module named 'a_package_for_uploads'"
    ),
    "a reward that drops an incomplete batch": Fault(
        3, {"reward": ("mine.py:score",)}, EIGHTS, r"got \[16\] scores, expected \[17\]"
    ),
    "a judge without a number after training": Fault(
        3, {"judge": "mine.py:score"}, JUDGE, "eval_judge is no finite number"
    ),
    "a metric with the name of a column": Fault(
        3, {"algorithm": "mine.py"}, ALGORITHM, "a metric is named kind"
    ),
    "an adapter that cannot be merged": Fault(
        1, ADAPTED, ADAPTER.replace("FAULT", "def merged_layer(self, layer): return {}['x']"), "failed .'x'."
    ),
    "an adapter that cannot be loaded": Fault(
        1, ADAPTED, ADAPTER.replace("    FAULT", UNLOADABLE), "step1_sft/model': cannot be loaded"
    ),
    "data that differ from call to call": Fault(1, {"data_path": ("mine.py:x",)}, DATA, "mine.py:x changed since"),
    "an objective for full batches": Fault(
        2, {"objective": "mine.py"}, OBJECTIVE, r"shape '\[2, 4\]' is invalid for input of size 7"
    ),
    "a template that fails for a response": Fault(3, SCORED, "", "cannot render .*no answers", scorer_of_prompts),
    "a model card that fails": Fault(1, {}, "", "step1_sft: model has no model card", failing(run, "write_card")),
    "a report that fails": Fault(
        1, {}, "", "no report can be made of the files there .KeyError: 'licence'", failing(write, "write_report")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_late_fault_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(fault.text)
    fault.prepare(tmp_path, monkeypatch)
    with pytest.raises((SystemExit, UserError)) as ended:
        rehearsal.rehearse({fault.step: options_of(fault.step, **fault.options)}, 1, run_here)
    said = f"{ended.value} {capsys.readouterr().out}".replace("\n", " ")
    assert re.search(fault.found, said), said
    assert "rehearsal: passed" not in said and not (tmp_path / "out" / rehearsal.FOLDER).exists()


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
def test_a_sound_stage_passes_and_is_resumed(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rehearsal.rehearse({step: options_of(step)}, 1, run_here)
    said = capsys.readouterr().out
    assert "resumes after step 2" in said and "rehearsal: passed" in said
    assert not (tmp_path / "out" / rehearsal.FOLDER).exists()
