"""A stage by itself, as a user types it: what a chain has at its start and its end, with the stage's own options."""

import shlex
from pathlib import Path

import pytest

from rlhf.chain import alone
from rlhf.chain.steps import next_step
from rlhf.errors import UserError, run_as_user
from rlhf.storage.manifests import MANIFEST, locked
from step1_sft.__main__ import main as sft
from step2_reward.__main__ import main as reward
from step2_reward.config import RewardConfig
from step3_ppo.__main__ import main as ppo
from tests.support import forked

DATA = ("--data-path", "demo,rows=200", "--max-prompt-length", "24", "--max-length", "48")
STEP_3 = ("--algorithm", "grpo", "--num-generations", "4", "--reward", "length,target=9", "--actor-model", "demo-llama",
          "--total-episodes", "16", "--batch-size", "8", "--response-length", "8", "--max-eval-rows", "4")  # fmt: skip


def test_a_run_has_a_verdict_a_report_and_a_next_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = forked.program("step3_ppo", *STEP_3, *DATA, "--output-dir", str(out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict, report, policy, following = done.stdout.splitlines()[-4:]
    assert "By the score `length,target=9` (the policy was trained on it): " in verdict
    assert report == f"report: {out}/report.html" and (out / "report.html").is_file()
    assert policy.startswith(f"The tuned policy is {out}/step3_ppo/actor: ") and following.endswith(f" chat {out}")
    assert not (out / "config.yaml").exists() and (out / "step3_ppo/config.yaml").is_file()


def test_a_plan_proposes_the_stages_own_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--plan", "--device", "T4", "--devices", "2", "--device-memory", "3MB", "--host-memory", "9GB")
    words = ("--model", "demo-llama", "--batch-size", "4096", *DATA, "--output-dir", str(tmp_path))
    assert sft([*words, *machine]) == 0
    text, _, proposed = capsys.readouterr().out.partition("a command that fits:\n")
    flags = proposed.split(str(tmp_path))[1].split()
    assert "step1_sft on 2 x T4" in text and "step2_reward" not in text
    assert proposed.startswith("python -m step1_sft --model demo-llama ") and "--plan" not in proposed
    assert "--zero-stage" in flags and "sft." not in proposed


@pytest.mark.parametrize(
    ("stage", "words", "message"),
    [
        (sft, ("--kl-coef", "1"), "no option '--kl-coef'"),
        (sft, ("--model", "demo-llama", "--max-length", "512"), "model 'demo-llama': its context is 128 tokens, but"),
        (ppo, ("--reward", "length"), "actor_model not found at"),
        (reward, ("--model", "demo-llama", "--hostfile", "x.txt"), "--hostfile x.txt: no such file"),
    ],
)
def test_a_mistake_names_options_as_typed(
    stage: object, words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*DATA, *words, "--output-dir", str(tmp_path / "out")]
    assert callable(stage) and run_as_user(lambda: stage(argv)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
    assert not (tmp_path / "out/step1_sft").exists()


@pytest.mark.parametrize("has_policy", [True, False])
def test_after_the_reward_model_comes_the_policy(
    has_policy: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed command is one of step 3, with the data of step 2 and the share of the prompts that are its own."""
    if has_policy:
        (tmp_path / "step1_sft").mkdir()
        (tmp_path / "step1_sft" / MANIFEST).write_text("{}")
    words = ["--model", "gpt2", *DATA, "--data-split", "0,1,0", "--output-dir", str(tmp_path)]
    read = alone.read_command(2, lambda _: RewardConfig, words, "rlhf reward")
    assert read is not None
    command = shlex.split(next_step(read.chain, "rlhf reward").removeprefix("next: "))
    assert command[:2] == ["rlhf", "ppo"]
    with pytest.raises(SystemExit):
        ppo([*command[2:], "--print-config", "--changed"])
    printed = capsys.readouterr().out
    assert ("actor_model: gpt2" in printed) != has_policy
    assert "data_split:\n- 0.0\n- 0.0\n- 1.0\n" in printed and "max_prompt_length: 24\n" in printed


def test_other_stages_may_run_in_the_same_directory(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="model 'demo-llama': its context is 128 tokens"):
        sft(["--model", "demo-llama", *DATA, "--max-length", "512", "--output-dir", str(tmp_path)])
