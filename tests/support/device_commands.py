"""The programs as a user types them, on the CPU and on the GPU of tests/support/devices.py, in one process.

    python -m tests.support.device_commands FOLDER NAME

runs the commands of that name in FOLDER/cpu, in fp32, and in FOLDER/gpu. Each has a commands.json with what they
print. On the GPU each stage of a chain is killed in its second step, and goes on from the checkpoint of the first.
"""

import builtins
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rlhf import cli, console
from rlhf.chain.rehearsal import FOLDER as REHEARSAL
from rlhf.errors import run_as_user
from rlhf.launch import launcher
from rlhf.launch.supervisor import ExitStatus
from rlhf.models import lm_head, packing
from rlhf.training import record
from tests.support import devices, one_process
from tests.support.killing import Killed

DATA = ("--data-path", "demo,rows=240", "--chat-template", "human_assistant", "--dtype", "fp32")
SHORT = ("--max-prompt-length", "24", "--max-length", "40", "--max-eval-rows", "6", "--micro-batch-size", "4")
STEPS = ("--learning-rate", "0.01", "--adam-epsilon", "0.01", "--batch-size", "8")
"""An epsilon that is larger than the rounding of a gradient, which a step then does not multiply."""
TWO = ("--max-train-rows", "16", "--num-train-epochs", "1")
"""steps"""
ITERATIONS = ("--total-episodes", "16", "--num-mini-batches", "2", "--num-ppo-epochs", "1", "--rollout-batch-size", "4",
              "--eval-samples", "4", "--response-length", "6")  # fmt: skip
DEMO = ("--actor-model", "demo-llama", "--reward-model", "demo-llama")
KILLED = ("--save-every", "1", "--max-restarts", "1")
ALONE = (*DATA, *SHORT, *STEPS, *TWO, *KILLED)
FIRST, SECOND = "learned,model=run/step2_reward", "learned,model=second/step2_reward"
PROMPTS = ("--prompts", "prompts.txt", "--dtype", "fp32", "--reward", FIRST)
CHAT = ("--seed", "1", "--response-length", "6", "--dtype", "fp32")


def chain(*words: str) -> list[str]:
    """A command with two steps of each stage."""
    return [
        *("train", *DATA, *SHORT, *KILLED),
        *(*_of_stage("sft", *STEPS, *TWO), *_of_stage("reward", *STEPS, *TWO), *_of_stage("ppo", *STEPS, *ITERATIONS)),
        *words,
    ]


def _of_stage(stage: str, *words: str) -> list[str]:
    return [f"--{stage}.{word[2:]}" if word.startswith("--") else word for word in words]


COMMANDS: dict[str, list[list[str]]] = {
    "chain": [
        ["reward", "--model", "demo-llama", *ALONE, "--seed", "2", "--output-dir", "second"],
        chain(*DEMO, "--output-dir", "run", "--ppo.reward", "learned", SECOND, "--ppo.reward-combine", "uncertain",
              "--ppo.ema-decay", "0.5", "--ppo.ptx-coef", "0.3", "--ppo.ptx-batch-size", "4"),
        ["verify", "run"],
        ["evaluate", "--policies", "run/step1_sft", "run/step3_ppo", *PROMPTS, "--select-by", SECOND,
         "--response-length", "6", "--output", "evaluated"],
        ["evaluate-reward", "run/step2_reward", "second/step2_reward", "--data-path", "demo,rows=8", "--dtype", "fp32",
         "--output", "rewards"],
        ["pairs", "--policies", "run/step3_ppo", *PROMPTS, "--response-length", "16", "--output", "pairs.jsonl"],
        ["chat", "run", *CHAT],
        ["export", "run", "--at", "0.5", "--merge", "between"],
    ],
    "trunk": [
        ["sft", "--model", "demo-llama", *ALONE, "--output-dir", "base"],
        chain("--actor-model", "base/step1_sft", "--reward-model", "base/step1_sft", "--share-trunk", "--adapter",
              "lora", "--output-dir", "run"),
        ["verify", "run"],
        ["export", "run", "--merge", "merged"],
        ["chat", "run", *CHAT],
    ],
    "grpo": [chain(*DEMO, "--output-dir", "run", "--ppo.algorithm", "grpo", "--ppo.num-generations", "4")],
    "rehearsal": [
        chain(*DEMO, "--output-dir", "run", "--rehearse", "--sft.max-train-rows", "40", "--reward.max-train-rows", "40",
              "--ppo.total-episodes", "40"),
    ],
    "bf16": [chain(*DEMO, "--output-dir", "run", "--steps", "1", "--sft.dtype", "bf16"), ["verify", "run"]],
    "fp16": [chain(*DEMO, "--output-dir", "run", "--steps", "1", "--sft.dtype", "fp16"), ["verify", "run"]],
}  # fmt: skip
ANIMALS = ("red fox", "blue crow", "white duck", "black seal", "green frog", "grey wolf")
TYPED = ("tell me about the red fox in the village", "/reset", "tell me about the blue crow in the field", "/quit")
"""what the person in a chat types"""


class Stages:
    """The stages of chains in this process: in place of `rlhf.launch.launcher.run`."""

    def __init__(self, killed: bool) -> None:
        """killed: each stage, when it runs for the first time"""
        self._killed = killed
        self._begun: set[str] = set()

    def __call__(self, module: str, words: list[str], target: object) -> ExitStatus:
        dies = self._killed and words[1] not in self._begun and REHEARSAL not in words[1]
        self._begun.add(words[1])
        try:
            with killed_at(2) if dies else contextlib.nullcontext():
                return one_process.run_stage(module, words, target)
        except Killed:
            return ExitStatus(1, "killed", crashed=True)


@contextlib.contextmanager
def killed_at(last: int) -> Iterator[None]:
    """Inside, a stage ends when it has recorded the step `last`, before its checkpoint."""
    write = record.Recorder.write

    def write_and_end(self: record.Recorder, kind: str, step: int, metrics: Any) -> None:
        write(self, kind, step, metrics)
        if (kind, step) == ("train", last):
            raise Killed

    record.Recorder.write = write_and_end
    try:
        yield
    finally:
        record.Recorder.write = write


def is_tried() -> bool:
    """Whether a model that is loaded is tried on a few tokens, before it goes to its device."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name not in (packing.detect_support.__name__, lm_head.detect.__name__):
        frame = frame.f_back
    return frame is not None


def run(words: Sequence[str]) -> dict[str, Any]:
    """The exit code of `rlhf WORDS`, what it prints, how often the host waits, and on which devices layers compute."""
    used: set[str] = set()

    def note(layer: nn.Module, _: object) -> None:
        for weight in layer.parameters(recurse=False):
            if weight.device.type not in used and not is_tried():
                used.add(weight.device.type)

    typed = iter(TYPED)
    builtins.input = lambda _: next(typed)
    sys.argv = sys.orig_argv = ["rlhf", *words]
    out, error = io.StringIO(), io.StringIO()
    hook = register_module_forward_pre_hook(note)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), devices.waits() as waits:
        try:
            code = run_as_user(lambda: cli.main(words))
        except SystemExit as leaving:
            code = int(str(leaving.code))
    hook.remove()
    texts = {"out": out.getvalue(), "error": error.getvalue()}
    return {"code": code, **texts, "waits": waits.total(), "devices": sorted(used)}


def run_all(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    folder.mkdir()
    (folder / "prompts.txt").write_text("".join(f"tell me about the {each} in the field\n" for each in ANIMALS))
    with contextlib.chdir(folder):
        done = {" ".join(words): run(words) for words in commands}
    (folder / "commands.json").write_text(json.dumps(done, indent=1))


def main(folder: Path, name: str) -> None:
    console.quiet_libraries = lambda: None
    device = devices.install()
    launcher.run = Stages(killed=False)
    in_fp32 = [["fp32" if word in ("bf16", "fp16") else word for word in words] for words in COMMANDS[name]]
    # `verify` compares with what is computed anew, so on the CPU it would tell nothing of the GPU.
    run_all(folder / "cpu", [words for words in in_fp32 if words[0] != "verify"])
    devices.use_for_training(device)
    launcher.run = Stages(killed=True)
    run_all(folder / "gpu", COMMANDS[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
