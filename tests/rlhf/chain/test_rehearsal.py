"""`--rehearse`: the run in small, in which what fails late fails before the run has started."""

import contextlib
import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from rlhf.chain import command as train
from rlhf.chain import rehearsal
from rlhf.launch import launcher
from rlhf.launch.supervisor import ExitStatus
from rlhf.models.load import load_config
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.algorithms import ppo, rloo
from tests.support import programs

ROOT = Path(__file__).parents[3]
COMMON: Any = {"data_path": ("demo,rows=400",), "chat_template": "human_assistant", "max_prompt_length": 24}
CRITIC: Any = {"critic_warmup_iterations": 9, "critic_pretraining_epochs": 4}


def todo_of(output: Path) -> dict[int, Any]:
    shared = {**COMMON, "output_dir": str(output), "batch_size": 8}
    return {
        1: SFTConfig(model="demo-llama", **shared, num_train_epochs=3, overwrite=True),
        2: RewardConfig(
            model=f"{output}/step1_sft", **shared, export_every=50, report_to=("wandb,project=mine", "tensorboard")
        ),
        3: ppo.Config(**shared, total_episodes=800, **CRITIC, reward_model="demo-llama"),
    }


def test_each_stage_has_two_steps_in_the_folder_of_the_rehearsal(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    first, second, third = rehearsal.in_small(todo_of(tmp_path / "out"), folder, ranks=1).values()
    assert {options.output_dir for options in (first, second, third)} == {str(folder)}
    assert (first.max_train_rows, first.batch_size, first.num_train_epochs, first.overwrite) == (15, 8, 1, False)
    assert (first.eval_every, first.save_every, first.export_every) == ("1", 1, None)
    assert second.model == str(folder / "step1_sft")  # which the rehearsal makes
    assert (second.export_every, second.report_to) == (1, ("wandb,project=.rehearsal", "tensorboard"))
    assert (third.total_episodes, third.critic_warmup_iterations, third.eval_every) == (16, 1, 1)
    assert third.critic_pretraining_epochs == 1
    assert third.actor_model is None and third.critic_model is None  # as in the run
    assert first.model == third.reward_model and Path(first.model).parent == folder


def test_numbers_of_rows_are_no_multiple_of_a_batch(tmp_path: Path) -> None:
    todo = todo_of(tmp_path) | {1: SFTConfig(model="demo-llama", **COMMON, output_dir=str(tmp_path), batch_size=1)}
    first, second, third = rehearsal.in_small(todo, tmp_path / "small", ranks=1).values()
    for size in range(2, 17):
        assert second.max_eval_rows % size and third.eval_samples % size
    assert first.max_train_rows == 2 and second.max_train_rows % second.batch_size == 7


def test_the_models_are_those_of_the_run_but_shallow(tmp_path: Path) -> None:
    whole = load_config("demo-llama")
    path = rehearsal.write_shallow("demo-llama", tmp_path / "shallow")
    small = AutoConfig.from_pretrained(path)
    changed = {name for name, value in whole.to_dict().items() if small.to_dict().get(name) != value}
    assert changed <= {"num_hidden_layers", "architectures", "dtype", "transformers_version", "_name_or_path"}
    assert small.num_hidden_layers == 2 < whole.num_hidden_layers or whole.num_hidden_layers == 2
    assert len(AutoTokenizer.from_pretrained(path)) == whole.vocab_size


def test_adapters_keep_the_models_that_they_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearsal, "is_adapter", lambda path: True)
    todo = {3: rloo.Config(**COMMON, output_dir=str(tmp_path), actor_model="demo-llama", reward=("length",))}
    assert rehearsal.in_small(todo, tmp_path / "small", ranks=1)[3].actor_model == "demo-llama"
    assert "with whole models, because one is an adapter" in capsys.readouterr().out


@pytest.mark.parametrize(("step", "changes", "left_out"), [
    (1, {"max_train_rows": 10}, True), (1, {"max_train_rows": 11}, False), (1, {"max_train_rows": None}, False),
    (3, {"total_episodes": 32}, True), (3, {"total_episodes": 33}, False),
])  # fmt: skip
def test_a_run_that_is_no_longer_than_a_rehearsal_has_none(
    step: int,
    changes: dict[str, Any],
    left_out: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rehearsal has two steps, then two more; here 8 rows each, in step 1 three times. It starts its stage twice, and
    each start is as long as this program has taken so far."""
    process = SimpleNamespace(create_time=lambda: time.time() - 60)
    monkeypatch.setattr(rehearsal, "psutil", SimpleNamespace(Process=lambda: process))
    options = todo_of(tmp_path)[step].model_copy(update={**changes, "actor_model": "demo-llama"})
    with contextlib.nullcontext() if left_out else pytest.raises(SystemExit):
        rehearsal.rehearse({step: options}, 1, lambda _: (step, ExitStatus(1)))
    said = capsys.readouterr().out
    assert ("left out, because the run itself is no longer" in said) == left_out
    assert ("2 starts of a stage take at least 2 min" in said) != left_out


TOO_FEW = """
calls = 0

def score(prompts, responses):
    global calls
    calls += 1
    return [float(len(response)) for response in responses[calls > 1 :]]  # the first call is before training
"""


def test_a_fault_in_training_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's reward with a score too few; test_rehearsed_faults.py has the other faults."""

    def stage(module: str, words: list[str], target: object) -> ExitStatus:
        try:
            return ExitStatus(importlib.import_module(f"{module}.__main__").process(words))
        except SystemExit as leaving:
            return ExitStatus(int(str(leaving.code)))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "run", stage)
    (tmp_path / "mine.py").write_text(TOO_FEW)
    words = ["--ppo.algorithm", "rloo", "--ppo.reward", "mine.py:score", "--rehearse", "--output-dir", "out"]
    words += ["--steps", "3", "--ppo.actor-model", "demo-llama", "--data-path", "demo,rows=600", "--no-torch-compile"]
    words += ["--ppo.batch-size", "16", "--ppo.total-episodes", "65536"]
    run = programs.runner("train.py", train.main, monkeypatch, capsys)
    code, output, error = run("--config", str(ROOT / "configs/demo.yaml"), *words)
    assert code != 0, output
    assert "rehearsal: step3_ppo failed" in output and "now the run" not in output
    assert "held-out prompts" not in output and "warning" not in output, "of models with random weights"
    assert "mine.py:score" in error  # what a user must mend is shown
    assert not (tmp_path / "out").exists(), "something is left of the rehearsal"
