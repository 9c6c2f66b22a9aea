"""The table of roles: which models a run has, where each starts, and what the manifest depends on."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.roles import Role, inputs, role_of
from rlhf.text import tokenizer
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from step3_ppo.algorithms import grpo, ppo
from step3_ppo.inputs import check
from step3_ppo.roles import ACTOR, CRITIC, named_roles, roles
from tests.rlhf.rewards.responses import other_tokenizer, reward_model
from tests.step3_ppo.test_critic import config_of, folder
from tests.support import tiny
from tests.support.plans import planned

__all__ = ["folder"]
STEP_1, STEP_2 = "out/step1_sft", "out/step2_reward"
BOTH = {"actor_model": STEP_1, "reward_model": STEP_2}
LENGTH = "length,target=5"
REFERENCE, SCORES = f"reference: {STEP_1}", f"reward model: {STEP_2}"
BY_ACTOR, BY_REWARD = f"critic: {STEP_1}, from actor", f"critic: {STEP_2}, from reward model"


def line(role: Role) -> str:
    """`critic: out/step2_reward, lora, on trunk, from reward model, is actor`."""
    parts = [role.path, role.adapter, "on trunk" if role.on_trunk else None]
    parts += [f"from {role.start.name}" if role.start else None, f"is {role.of.name}" if role.of else None]
    return f"{role.part.name}: {', '.join(filter(None, parts))}"


@pytest.mark.parametrize(
    ("options", "models", "of_manifest"),
    [
        ({}, [REFERENCE, BY_REWARD, SCORES], "both"),
        ({"critic_model": "policy"}, [REFERENCE, BY_ACTOR, SCORES], "reward"),
        ({"reward": LENGTH}, [REFERENCE, BY_ACTOR], "actor"),
        ({"reward": LENGTH, "critic_model": "reward"}, [REFERENCE, BY_REWARD], "both"),
        ({"reward": LENGTH, "critic_model": "c"}, [REFERENCE, "critic: c"], "critic"),
        ({"reward": LENGTH, "judge": "learned"}, [REFERENCE, BY_ACTOR, SCORES], "reward"),
        (
            {"reward": "learned,model=m", "critic_model": "shared"},
            [REFERENCE, f"{BY_ACTOR}, is actor", "reward model: m"],
            "actor",
        ),
        (
            {"adapter": "lora", "reward": LENGTH},
            [f"{REFERENCE}, is actor", f"critic: {STEP_1}, lora, from actor"],
            "actor",
        ),
        (
            {"adapter": "lora", "share_trunk": True},
            [
                f"{REFERENCE}, on trunk, is actor",
                f"critic: {STEP_2}, lora, on trunk, from reward model",
                f"{SCORES}, lora, on trunk",
            ],
            "both",
        ),
    ],
)
def test_the_models_that_options_name(options: dict[str, Any], models: list[str], of_manifest: str) -> None:
    config = ppo.Config(output_dir="out", **options)
    actor, *others = named_roles(config)
    assert actor.part is ACTOR and actor.path == STEP_1 and [line(role) for role in others] == models
    expected = {
        "actor": {"actor_model": STEP_1},
        "reward": BOTH,
        "critic": {"actor_model": STEP_1, "critic_model": "c"},
        "both": BOTH | {"critic_model": STEP_2},
    }
    assert inputs(named_roles(config)) == expected[of_manifest]
    without = grpo.Config(algorithm="grpo", num_generations=2, output_dir="out", **options)
    assert role_of(named_roles(without), CRITIC) is None


def test_a_critic_reads_the_ids_that_an_earlier_stage_adds(folder: Path) -> None:
    """Its reward model starts from the model without them, which has the actor's tokenizer until then."""
    starts = {"actor_model": str(folder / "policy"), "reward_model": str(folder / "same")}
    ids = {"step1_sft": Role(ACTOR, starts["actor_model"], EngineOptions(), ids=(68, 70))}
    earlier = {**planned(starts), **ids}
    config = config_of(folder, actor_model=None, reward_model=None)
    critic = role_of(roles(config, earlier), CRITIC)
    assert critic is not None and (critic.path, critic.start, critic.ids) == (starts["actor_model"], ACTOR, (70, 70))
    with pytest.raises(UserError, match="with the tokens that an earlier stage adds; expected models of one family"):
        check(config.model_copy(update={"critic_model": "reward"}), earlier)


def test_a_plan_without_tokenizers_expects_the_same_ids(tmp_path: Path) -> None:
    config = ppo.Config(actor_model="a", reward_model="b", critic_model="c", output_dir=str(tmp_path))
    table = roles(config, find=lambda _: None)
    critic = role_of(table, CRITIC)
    assert critic is not None and critic.path == "c"


def test_a_check_loads_each_tokenizer_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for the size of the embeddings, which plans keep as long as the process."""
    other = other_tokenizer()
    ids = {name: getattr(other, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    reward_model(tmp_path / "one", other, "llama", **ids)
    for name in ("policy", "two"):
        tiny.causal_lm("llama").save_pretrained(tmp_path / name)
        tiny.tokenizer().save_pretrained(tmp_path / name)
    reward_model(tmp_path / "two", tiny.tokenizer(), "llama")
    paths: list[str] = []
    load = tokenizer.auto_tokenizer
    monkeypatch.setattr(tokenizer, "auto_tokenizer", lambda path: paths.append(path) or load(path))
    named = {"actor_model": str(tmp_path / "policy"), "reward_model": str(tmp_path / "two")}
    check(config_of(folder, **named, reward=("learned", f"learned,model={tmp_path / 'one'}")))
    counts = {name: paths.count(str(tmp_path / name)) for name in ("policy", "two", "one")}
    assert counts == {"policy": 2, "two": 2, "one": 1}


def test_a_model_with_an_encoder_cannot_share_a_base(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    config = SFTConfig(model=str(tmp_path), adapter="lora", share_trunk=True, output_dir=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"got an encoder-decoder \(t5\)"):
        FINE_TUNING.check(config)
