"""What the stages check before they load a model, and what step 3 then loads."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data.dataset import Recipe
from rlhf.distributed import collectives
from rlhf.engine.frozen import FrozenEngine
from rlhf.errors import UserError
from rlhf.models.packing import packs
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING as sft
from step2_reward.config import RewardConfig
from step2_reward.stage import REWARD_MODELLING as reward
from step3_ppo import stage as ppo
from step3_ppo.algorithms import rloo
from step3_ppo.models import set_up
from tests.support import tiny
from tests.support.demo import SMALL


def options(out: Path, **changes: Any) -> rloo.Config:
    """Of a policy that is drawn, without a learned reward."""
    base = {"actor_model": "demo-llama", "reward": ("length,target=5",), "output_dir": str(out), "response_length": 16}
    return rloo.Config(**{**SMALL, **base, "algorithm": "rloo", **changes})


def each_stage(out: Path) -> list[tuple[str, Any, Any]]:
    small = {**SMALL, "model": "demo-llama", "output_dir": str(out)}
    supervised = [("step1_sft", sft, SFTConfig(**small)), ("step2_reward", reward, RewardConfig(**small))]
    return [*supervised, ("step3_ppo", ppo, options(out))]


def test_every_stage_checks_for_the_processes_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "world_size", lambda: 5)
    for _, stage, config in each_stage(tmp_path):
        with pytest.raises(UserError, match=r"--batch-size \d+: expected a multiple of \d+ \(5 processes"):
            stage.run(config)


def test_steps_1_and_2_check_for_one_process_unless_told(tmp_path: Path) -> None:
    for _, stage, config in each_stage(tmp_path)[:2]:
        stage.check(config.model_copy(update={"batch_size": 31}))


def test_what_is_learned_of_a_dialogue_and_of_a_text_is_the_users_choice() -> None:
    assert sft.recipe(SFTConfig(loss_on="every")) == Recipe("sft", "every", "response")
    assert sft.recipe(SFTConfig(loss_on="all", objective="text")) == Recipe("sft", "all", "text")


def test_every_row_has_a_result_that_match_can_compare_with(tmp_path: Path) -> None:
    answers = {"train": [*range(40), "forty"], "held_out": [*range(4)]}
    for name, cells in answers.items():
        rows = [json.dumps({"prompt": f"{name} {i}?", "answer": cell}) + "\n" for i, cell in enumerate(cells)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    paths = {"data_path": (str(tmp_path / "train.jsonl"),), "eval_data_path": (str(tmp_path / "held_out.jsonl"),)}
    fitting = {**paths, "data_split": (0, 0, 1), "eval_samples": 4}
    ppo.check(options(tmp_path, **fitting, judge="match"))
    with pytest.raises(
        UserError, match=r"the prompt that ends in 'train 40\?': got 'forty', in which there is no number"
    ):
        ppo.check(options(tmp_path, **fitting, reward=("0.5*match", "length,target=5")))


def test_every_stage_checks_the_room_for_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes a number that learns, for each checkpoint that is kept and the one being written."""
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for name, stage, config in each_stage(tmp_path):
        with pytest.raises(UserError, match=rf"^{re.escape(str(tmp_path / name))}: .* are free there, expected"):
            stage.check(config)


def test_a_reference_drawn_from_a_config_is_the_actor_as_it_was_drawn(tmp_path: Path) -> None:
    """A model without weights of its own gets those of the seed."""
    drawn = []
    for seed in (3, 4):
        config = options(tmp_path, seed=seed)
        checked = ppo.check(config)
        with tiny.one_rank():
            game = set_up(config, checked.roles, checked.tokenizer, None)
            assert isinstance(game.scorer.reference.source, FrozenEngine)
            with game.actor.inference() as actor, game.scorer.reference.source.inference() as reference:
                own, other = actor.state_dict(), reference.state_dict()
                assert own and all(torch.equal(weight, other[name]) for name, weight in own.items())
                drawn.append(actor.lm.get_output_embeddings().weight.clone())
    assert not torch.equal(*drawn)


def test_one_device_packs_the_rows_of_steps_1_and_2(tmp_path: Path) -> None:
    """A model whose rows several ranks share computes padding."""
    for _, stage, config in each_stage(tmp_path)[:2]:
        _, tokenizer, data = stage.check(config)
        with tiny.one_rank():
            module = stage.load(config, "demo-llama", tokenizer, data, 1).engine.module
            assert packs(getattr(module, "lm", None) or module.backbone, 1)


def test_a_backend_of_ones_own_checks_the_actors_options_and_those_of_sampling(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from rlhf.errors import UserError\n"
        "from rlhf.generation import loop\n"
        "build = loop.build\n"
        "class Config(loop.Config):\n"
        "    def check(self, engine, sampling):\n"
        "        raise UserError(f'{engine.zero_stage} {sampling.temperature} {self.max_tokens}')\n"
    )
    own = {"rollout_backend": str(tmp_path / "own.py"), "actor": {"zero_stage": 2}, "temperature": 0.75}
    chosen = options(tmp_path, **own)
    with pytest.raises(UserError, match=rf"^2 0\.75 {chosen.max_prompt_length + chosen.response_length}$"):
        ppo.check(chosen)
