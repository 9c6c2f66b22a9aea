"""What each kind of plug-in must have is written down: a plug-in that has it works, another is refused by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.prepare.mixture import open_origin
from rlhf import adapters, generation, rewards
from rlhf.errors import UserError
from step3_ppo import algorithm_options, algorithms, stage
from step3_ppo.config import Step3Config
from tests.support import tiny
from tests.support.demo import SMALL as DEMO
from tests.support.players import SMALL, on_course, players, twice_each

COUNTED = "import sys\nsys.executed = [*getattr(sys, 'executed', []), __file__.rpartition('/')[2]]\n"
"""In a user's file: notes that the file is executed."""
ENDS = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
ALGORITHM = """
from rlhf.maths import losses
from rlhf.types import Credit
from step3_ppo.config import Step3Config

class Config(Step3Config):
    pass

class Mine:
    def credit(self, rollout, iteration):
        scores = rollout.scores[:, None] * rollout.mask
        return Credit(scores, scores)

    def policy_loss(self, logprobs, rollout, credit, count, iteration):
        return -(logprobs * credit.advantages * rollout.mask).sum() / count, {}

def build(config):
    return Mine()
"""
VALUE_LOSS = """
    def value_loss(self, values, rollout, credit, count, iteration):
        return ((values - credit.returns) ** 2 * rollout.mask).sum() / count, {}
"""
DATASET = """
from rlhf.config import Config
from rlhf.types import Message, Row

class Sums:
    def rows(self, phase):
        return (Row((Message("user", f"What is {i} + 1 ?"),), response=str(i + 1)) for i in range(200))

def build(config, path):
    return Sums()
"""


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


BACKEND = """
from rlhf.config import Config as Base
from rlhf.generation import BackendOptions, loop

class Config(BackendOptions):
    pass

def build(config):
    generate = loop.build(config)
    return lambda lm, prompts, sampling, uniforms: generate(lm, prompts, sampling, uniforms)
"""


def test_a_backend_of_its_required_members_alone_samples(tmp_path: Path) -> None:
    path = written(tmp_path, BACKEND)
    with tiny.one_rank():
        game = players("rloo")
        mine, loop = (game.sample(twice_each(), backend=backend) for backend in (path, "loop"))
    assert torch.equal(mine.response_ids, loop.response_ids)
    assert generation.options(path, **ENDS).device_share() == 0.0


@pytest.mark.parametrize("critic", [False, True])
def test_an_algorithm_of_what_the_readme_says_trains(critic: bool, tmp_path: Path) -> None:
    """A credit and a policy loss, and a critic where it has a value loss; nothing else."""
    text = ALGORITHM.replace("\ndef build", VALUE_LOSS + "\ndef build") if critic else ALGORITHM
    with tiny.one_rank():
        game = players(written(tmp_path, text), total_episodes=16)
        before = game.weights()
        steps = list(on_course(game))
        after = game.weights()
    assert (game.critic is not None) == critic == ("value_loss" in steps[0])
    assert len(steps) == 2 and all(step["kl_coef"] == 0.0 for step in steps)
    changed = {name.split(".")[0] for name, weight in before.items() if (after[name] != weight).any()}
    assert changed == ({"actor", "critic"} if critic else {"actor"})


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("Credit(scores, scores)", "Credit(scores[:, :-1], scores)", "credit returned advantages: a tensor of shape ("),
        ("Credit(scores, scores)", "Credit(scores, rollout.scores)", "credit returned returns: a tensor of shape ("),
        ("Credit(scores, scores)", "scores", "credit returned a value of type Tensor, expected a Credit"),
        ("return Credit", "return missing", "in credit: NameError: name 'missing"),
        (".sum() / count, {}", ".sum(1) / count, {}", "policy_loss returned the loss a tensor of shape ("),
        (".sum() / count, {}", ".sum() / count", "policy_loss returned a tensor of shape () and torch.float"),
        ("-(logprobs *", "-(logprobs.detach() *", "policy_loss returned the loss a tensor of shape () and torch.float"),
        ("count, {}", "count, {'x': credit.returns}", "policy_loss returned the metric x: a tensor of shape ("),
        ("class Mine:", "class Mine:\n    select = lambda self, r: r.mask", "select returned a tensor of shape ("),
    ],
)
def test_an_algorithm_that_returns_something_else_is_named(
    right: str, wrong: str, message: str, tmp_path: Path
) -> None:
    assert right in ALGORITHM
    path = written(tmp_path, ALGORITHM.replace(right, wrong))
    with tiny.one_rank(), pytest.raises(UserError) as refused:
        list(on_course(players(path, total_episodes=16)))
    assert message in str(refused.value) and path in str(refused.value) and "\n" not in str(refused.value)


FILE = """
from rlhf.config import Config as Base

class Config(Base):
    pass

class Mine:
    pass

def build(config, *args):
    return Mine()
"""
ADAPTER = FILE.replace(
    "    pass\n\ndef build(config, *args)",
    """    def wrap(self, model):
        model.requires_grad_(False)

    def disabled(self, model): ...

    def merged(self, model, state): ...

def build(config)""",
)


def wrap(path: str) -> Any:
    return adapters.wrap(tiny.causal_lm(), path)


def reward(path: str) -> rewards.Source:
    return rewards.open_unchecked(path, rewards.Context(tiny.tokenizer(), torch.device("cpu"), torch.float32, "", 1))


def algorithm(path: str) -> None:
    algorithm_options.options(path)
    algorithms.load(Step3Config(**SMALL, algorithm=path))


def backend(path: str) -> None:
    generation.open_backend(path, **ENDS)


LACKING: list[tuple[Callable[[str], Any], str, str, str, str]] = [
    (backend, BACKEND, "lambda lm, prompts, sampling, uniforms:", "lambda lm, prompts:",
     "expected __call__(lm, prompts, sampling, uniforms)"),
    (backend, BACKEND, "(BackendOptions)", "(Base)", "expected a class derived from rlhf.generation.BackendOptions"),
    (algorithm, ALGORITHM, "credit(self", "credits(self",
     "build returned a value of type Mine, which has no function credit; expected credit(rollout, iteration)"),
    (algorithm, ALGORITHM, "logprobs, rollout, credit, count, iteration)", "logprobs, credit)",
     "Mine: got policy_loss(logprobs, credit), expected policy_loss("),
    (algorithm, ALGORITHM, "Mine:", "Mine:\n    select = 3", "no function select; expected select(ScoredRollout)"),
    (algorithm, ALGORITHM, "Mine:", "Mine:\n    def value_loss(self): ...",
     "got value_loss(), expected value_loss(Tensor, ScoredRollout, Credit, Tensor, Iteration)"),
    (algorithm, ALGORITHM, "(Step3Config)", "", "expected a class derived from step3_ppo.config.Step3Config"),
    (algorithm, ALGORITHM, "class Config", "class Options", "has no Config"),
    (reward, FILE, "", "", "has no function __call__; expected __call__(samples)"),
    (reward, FILE, "pass\n\ndef", "def __call__(self): ...\n\ndef", "Mine: got __call__(), expected"),
    (reward, FILE, "config, *args", "config", "got build(config), expected build(config, Context)"),
    (open_origin, FILE, "", "", "has no function rows; expected rows(phase)"),
    (adapters.open_adapter, FILE, "", "", "has no function wrap; expected wrap(model)"),
    (adapters.open_adapter, ADAPTER, "merged(self, model, state)", "merged(self)", "expected merged(model"),
    (wrap, ADAPTER, "", "", "after wrap(model) no weight requires gradients"),
]  # fmt: skip
"""the plug-in, its file, what in it is replaced by what, and the error"""


@pytest.mark.parametrize(("load", "text", "right", "wrong", "message"), LACKING)
def test_a_plugin_that_lacks_something_is_refused(
    load: Callable[[str], Any], text: str, right: str, wrong: str, message: str, tmp_path: Path
) -> None:
    assert right in text
    path = written(tmp_path, text.replace(right, wrong) if right else text)
    with pytest.raises(UserError) as refused:
        load(path)
    assert message in str(refused.value) and path in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_is_executed_once_in_a_whole_step_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executed", [], raising=False)
    monkeypatch.chdir(tmp_path)
    scores = "def score(prompts, responses): return [1.0] * len(responses)"
    texts = {"algorithm": ALGORITHM, "dataset": DATASET, "reward": scores}
    for name, text in texts.items():
        written(tmp_path, COUNTED + text, f"{name}.py")
    config = algorithm_options.options("algorithm.py")(
        **{**DEMO, "data_path": ["dataset.py"]},
        algorithm="algorithm.py",
        reward=["reward.py:score"],
        judge="./reward.py",
        actor_model="demo-llama",
        output_dir="out",
        response_length=4,
        total_episodes=32,
        eval_samples=4,
    )
    stage.run(config)
    assert sorted(sys.executed) == ["algorithm.py", "dataset.py", "reward.py"]
