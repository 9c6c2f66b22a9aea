"""Faults that end or spoil the last hours of a run: a rehearsal finds each, here in the process of the test."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain import rehearsal
from rlhf.errors import UserError
from rlhf.launch.supervisor import ExitStatus
from rlhf.report import write
from rlhf.training import run
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo import algorithm_options
from tests.support import killing

SMALL: dict[str, Any] = {
    "data_path": ("demo,rows=400",), "chat_template": "human_assistant", "max_prompt_length": 24, "max_length": 48,
    "dtype": "fp32", "batch_size": 8, "output_dir": "out",
}  # fmt: skip
SAMPLING: dict[str, Any] = {"total_episodes": 80, "response_length": 4, "actor_model": "demo-llama"}


def options_of(step: int, algorithm: str = "rloo", **changes: Any) -> Any:
    """The options of a stage alone."""
    if step == 3:
        own = SAMPLING | {"reward": ("length,target=4",), "algorithm": algorithm}
        return algorithm_options.options(algorithm)(**SMALL | own | changes)
    return {1: SFTConfig, 2: RewardConfig}[step](**SMALL | {"model": "demo-llama"} | changes)


def run_here(todo: dict[int, Any]) -> tuple[int, ExitStatus] | None:
    """In place of `rlhf.chain.command.run_all`."""
    for step, options in todo.items():
        try:
            killing.run(options)
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
ADAPTER = """
from peft import LoraConfig
from rlhf.adapters.lora import LoRA
from rlhf.config import Config

class Mine(LoRA):
    def merged(self, model, state):
        return {name: weight.flatten() for name, weight in super().merged(model, state).items()}

def build(config): return Mine(LoraConfig(r=2, target_modules="all-linear"))
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


def fail(*_: Any) -> None:
    raise KeyError("licence")


@dataclass(frozen=True)
class Fault:
    step: int
    options: dict[str, Any]
    text: str
    """of the user's file"""
    found: str
    """the words that name it"""
    failing: tuple[Any, str] | None = None
    """a module, and its function that fails"""


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
    "an adapter that cannot be loaded": Fault(
        1, {"adapter": "mine.py"}, ADAPTER, "step1_sft/model': cannot be loaded"
    ),
    "data that differ from call to call": Fault(1, {"data_path": ("mine.py:x",)}, DATA, "mine.py:x changed since"),
    "a model card that fails": Fault(1, {}, "", "step1_sft: model has no model card", (run, "write_card")),
    "a report that fails": Fault(
        1, {}, "", "no report can be made of the files there .KeyError: 'licence'", (write, "write_report")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_late_fault_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(fault.text)
    if fault.failing is not None:
        monkeypatch.setattr(*fault.failing, fail)
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
    monkeypatch.setattr(rehearsal.console, "silent", contextlib.nullcontext)
    rehearsal.rehearse({step: options_of(step)}, 1, run_here)
    said = capsys.readouterr().out
    assert "resumes after step 2" in said and "rehearsal: passed" in said
    assert not (tmp_path / "out" / rehearsal.FOLDER).exists()
