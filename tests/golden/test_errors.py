"""What users read of a mistake, word by word: errors.txt has what is typed, and under it the line that answers it.

`python -m tests.golden.test_errors` writes the answers anew; the difference in git is the review.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from data.prepare.mixture import open_origin
from data.sources.files import parse
from rlhf import adapters, cli, console, errors, generation, plugins, rewards
from rlhf.chain import command
from rlhf.chain.options import overlay, read, require_agreement
from rlhf.chain.verify import VerifyConfig
from rlhf.chat.options import ChatOptions, check_chat
from rlhf.config import Config, parser
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.evaluation import evaluate, pairs
from rlhf.evaluation.batch_generation import read_prompts
from rlhf.launch import hosts, launcher
from rlhf.launch.hosts import LaunchOptions
from rlhf.models.splitting import check_split, replicas
from rlhf.text.messages import read_message
from rlhf.text.templates import find_template
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.training.checks import check_engine, check_ranks
from rlhf.training.trackers import check_trackers
from step1_sft import __main__ as sft
from step1_sft.config import SFTConfig
from step2_reward import __main__ as reward
from step2_reward.config import RewardConfig
from step2_reward.evaluation_options import EvaluateRewardConfig
from step3_ppo import __main__ as ppo
from step3_ppo import algorithm_options
from step3_ppo.inputs import check as check_step_3
from tests.support import texts, tiny
from tests.support.programs import without_status

FILE = Path(__file__).with_name("errors.txt")
FOLDERS = (
    "rlhf.adapters", "rlhf.rewards", "rlhf.generation", "rlhf.training.trackers", "step2_reward.objectives",
    "step3_ppo.algorithms",
)  # fmt: skip


def _wrap(typed: str) -> object:
    family, _, spec = typed.partition(" ")
    return adapters.wrap(tiny.causal_lm(family), spec)


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    """It is the working directory, of which messages do not tell."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            yield
        except UserError as error:
            raise UserError(str(error).replace(f"{folder}/", "").replace(f"{before}/", "")) from None


def _in_file(name: str, read: Callable[[str], object], before: bytes = b"") -> Callable[[str], object]:
    """What is typed is the content of a file, after `before`; a ¶ is a new line."""

    def call(typed: str) -> object:
        with _empty_folder():
            Path(name).write_bytes(before + typed.replace("¶", "\n").encode("latin-1"))
            return read(name)

    return call


def _parsed(config: type[Config]) -> Callable[[str], object]:
    return lambda typed: parser.parse(config, typed.split(), "program", "what it does")


def _step_3(typed: str) -> Config:
    """The algorithm stands before its options."""
    name, *words = typed.split()
    return parser.parse(algorithm_options.options(name), ["--algorithm", name, *words], "step3_ppo", "")


def _checked_step_3(typed: str) -> None:
    """The number of processes stands before it, and the model is the demo's."""
    ranks, _, words = typed.partition(" ")
    models = " --actor-model demo-llama --data-path demo,rows=400 --critic-model demo-llama --reward length,target=4"
    check_step_3(_step_3(words + models), ranks=int(ranks))


def _engine(typed: str) -> None:
    """The number of processes stands before the options."""
    ranks, *words = typed.split()
    options = parser.parse(EngineOptions, words, "", "")
    check_engine(options, ranks=int(ranks))
    replicas(options, int(ranks))


def _split(typed: str) -> None:
    """A model type, with values of its config, before the options."""
    family, *words = typed.split()
    name, _, changes = family.partition("{")
    with _empty_folder():
        tiny.config_of(name, **json.loads("{" + changes if changes else "{}")).save_pretrained("model")
        check_split(parser.parse(EngineOptions, words, "", ""), "model")


def _hosts(typed: str) -> None:
    """The lines of the hostfile before the options, apart by |."""
    text, *words = typed.split("|")
    options = parser.parse(LaunchOptions, ["--hostfile", "hosts.txt", *words], "", "")
    in_file = _in_file("hosts.txt", lambda _: hosts.open_deployment(options, most=4))
    with mock.patch.dict(os.environ, PATH=""):
        in_file(text)


def _deepspeed(typed: str) -> None:
    """The JSON before the options of the chain, apart by |."""
    tree, *words = typed.split("|")

    def read_with(name: str) -> None:
        argv = ["--deepspeed-config", name, *words]
        require_agreement(argv, read(argv, overlay(argv, 0)))

    _in_file("ds.json", read_with)(tree)


def _refusing(main: Callable[[], int]) -> Callable[[str], None]:
    """A program in an empty folder, as it is typed: with code 2, it starts no stage, prints nothing else, and leaves
    nothing. Without --data-path it has few rows of the demo's."""

    def started(*_: object) -> int:
        raise AssertionError("a stage was started")

    def call(typed: str) -> None:
        words = typed.split() if "--data-path" in typed else [*typed.split(), "--data-path", "demo,rows=2000"]
        out, err = io.StringIO(), io.StringIO()
        patches = [
            mock.patch.object(console, "quiet_libraries", lambda: None),
            mock.patch.object(torch.cuda, "device_count", lambda: 0),
            mock.patch.object(launcher, "run", started),
            mock.patch.object(sys, "argv", ["program", *words, "--output-dir", "out"]),
        ]
        with _empty_folder(), contextlib.ExitStack() as stack:
            for patch in (*patches, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
                stack.enter_context(patch)
            try:
                code = errors.run_as_user(main)
            except SystemExit as leaving:
                code = int(str(leaving.code))
            assert (code, out.getvalue(), os.listdir()) == (2, "", [])
            raise UserError(without_status(err.getvalue()).removeprefix("error: ").removesuffix("\n"))

    return call


def _rewards(typed: str) -> object:
    return rewards.open_sources(typed.split(), rewards.Context(None, torch.device("cpu"), torch.float32, "", 1))  # type: ignore[arg-type]


def _program(main: Callable[[Sequence[str]], int], typed: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as output:
        code = main(typed.split())
    if code == 2:
        raise UserError(output.getvalue().removesuffix("\n"))


KINDS: Mapping[str, Callable[[str], object]] = {
    "--adapter": _wrap,
    "--ppo.reward": _rewards,
    "--rollout-backend": lambda typed: generation.open_backend(typed, eos_token_id=2, pad_token_id=0),
    "--chat-template": lambda typed: find_template(typed, None),
    "--chat-template-file": _in_file(
        "mine.jinja", lambda name: prepare_tokenizer(texts.byte_tokenizer(), f"{os.getcwd()}/{name}")
    ),
    "--model": _in_file("model.yaml", load_tokenizer),
    "--prompts": _in_file("p.jsonl", read_prompts, b'{"prompt": "good"}\n'),
    "--data-path": open_origin,
    "row": lambda typed: parse(json.loads(typed), "f:1"),
    "message": lambda typed: read_message(json.loads(typed), "here"),
    "--config": _in_file("a.yaml", lambda name: read(["--config", name])),
    "--deepspeed": _deepspeed,
    "--hostfile": _hosts,
    "engine": _engine,
    "split": _split,
    "batch": lambda typed: check_ranks(
        *map(int, typed.split()[:2]), "batch_size", int(typed.split()[2]), "num_mini_batches"
    ),
    "train": lambda typed: read(typed.split()),
    "step1_sft": _parsed(SFTConfig),
    "step2_reward": _parsed(RewardConfig),
    "step3_ppo": _step_3,
    "step3_ppo-check": _checked_step_3,
    "evaluate-reward": _parsed(EvaluateRewardConfig),
    "chat": lambda typed: check_chat(parser.parse(ChatOptions, typed.split(), "program", "what it does")),
    "rlhf": lambda typed: cli.main(typed.split()),
    "--report-to": lambda typed: check_trackers([typed]),
    "verify": _parsed(VerifyConfig),
    "evaluate": lambda typed: _program(evaluate.main, typed),
    "pairs": lambda typed: _program(pairs.main, typed),
    "run-train": _refusing(command.main),
    "run-step1_sft": _refusing(sft.main),
    "run-step2_reward": _refusing(reward.main),
    "run-step3_ppo": _refusing(ppo.main),
}
"""By the option or program; what stands before the options is said above. A file of prompts or a template has its first
lines already; `batch` has the rows, processes and minibatches of a step."""


def table() -> list[tuple[str, str]]:
    """(what is typed, the answer) of each row."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return list(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


def answer(typed: str) -> str:
    kind, _, rest = typed.partition(" ")
    try:
        KINDS[kind](rest)
    except UserError as error:
        return _without_names(str(error))
    return ""


def _without_names(text: str) -> str:
    """The whole list of a folder's plug-ins as `...`, so that a new one changes no answer."""
    for folder in FOLDERS:
        text = text.replace(f"in {folder}; have {', '.join(plugins.names(folder))}", f"in {folder}; have ...")
    return text


@pytest.mark.parametrize(("typed", "expected"), table(), ids=[typed for typed, _ in table()])
def test_a_mistake_is_answered_in_one_line(typed: str, expected: str) -> None:
    assert answer(typed) == expected and "\n" not in expected


if __name__ == "__main__":
    FILE.write_text("".join(f"{typed}\n    {answer(typed)}\n" for typed, _ in table()), encoding="utf-8")
