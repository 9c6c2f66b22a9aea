"""What the critic starts from, what a reward model with other tokens needs, and models that cannot be trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from rlhf.config.options import OwnEngineOptions
from rlhf.errors import UserError
from rlhf.roles import inputs, role_of
from step3_ppo import stage
from step3_ppo.algorithms import grpo, ppo
from step3_ppo.inputs import check
from step3_ppo.models import set_up
from step3_ppo.roles import CRITIC, named_roles, notes, roles
from tests.rlhf.rewards.responses import other_tokenizer, reward_model
from tests.support import tiny
from tests.support.plans import planned


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reward model with its tokenizer (`same`) and one with another (`other`), and prompts."""
    path = tmp_path_factory.mktemp("critic")
    tiny.causal_lm("llama").save_pretrained(path / "policy")
    tiny.tokenizer().save_pretrained(path / "policy")
    other = other_tokenizer()
    ids = {name: getattr(other, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    reward_model(path / "other", other, "llama", **ids)
    reward_model(path / "same", tiny.tokenizer(), "llama")
    rows = [f"w{i} w5 w6" for i in range(4, 90)]
    (path / "x.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return path


def config_of(folder: Path, **changes: Any) -> ppo.Config:
    models = {"actor_model": str(folder / "policy"), "reward_model": str(folder / "same")}
    lengths = {"max_length": 32, "max_prompt_length": 16, "response_length": 16, "dtype": "fp32"}
    size = {"batch_size": 4, "total_episodes": 4, "num_mini_batches": 1, "max_eval_rows": 4, "eval_samples": 4}
    data = {"data_path": (str(folder / "x.jsonl"),), "data_split": (0, 0, 1), "data_cache": str(folder / "cache")}
    return ppo.Config(**{**models, **lengths, **size, **data, "output_dir": str(folder / "out"), **changes})


@pytest.mark.parametrize(
    ("reward", "option", "start", "reason"),
    [
        ("same", None, "same", "the reward model, with the actor's tokenizer"),
        ("same", "reward", "same", "--critic-model reward"),
        ("other", None, "policy", "other' has another tokenizer or chat template"),
        ("same", "policy", "policy", "--critic-model policy"),
        ("other", "{folder}/same", "same", "--critic-model "),
    ],
)
def test_the_critic_starts_from_a_model_with_the_actors_tokens(
    reward: str, option: str | None, start: str, reason: str, folder: Path
) -> None:
    option = option and option.replace("{folder}", str(folder))
    config = config_of(folder, reward_model=str(folder / reward), critic_model=option)
    check(config)
    table = roles(config)
    critic = role_of(table, CRITIC)
    assert critic is not None and critic.path == str(folder / start)
    [line] = notes(config, table)
    assert line.startswith(f"the critic starts from '{folder / start}'") and reason in line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"critic_learning_rate": 1e-4}, "no effect, as grpo has no critic: critic_learning_rate 0.0001"),
    ],
)
def test_options_of_a_critic_that_there_is_not(changes: dict[str, float], line: str | None) -> None:
    without = grpo.Config(algorithm="grpo", **changes)
    assert [*notes(without, named_roles(without))] == ([] if line is None else [line])


@pytest.mark.parametrize(("reward", "start"), [("same", "same"), ("other", "policy")])
def test_before_the_earlier_stages_run_the_critic_starts_from_the_same_model(
    reward: str, start: str, folder: Path
) -> None:
    """Policy and reward model are then what the earlier stages start from."""
    config = config_of(folder, actor_model=None, reward_model=None)
    earlier = planned({"actor_model": str(folder / "policy"), "reward_model": str(folder / reward)})
    critic = role_of(check(config, earlier).roles, CRITIC)
    assert critic is not None and critic.path == str(folder / start)
    if reward == "other":
        with pytest.raises(UserError, match="other': its tokenizer or chat template gives other ids"):
            named = config.model_copy(update={"critic_model": "reward"})
            check(named, earlier)
        with pytest.raises(UserError, match=r"critic '.*other': its tokenizer or chat template gives other ids"):
            check(config_of(folder, critic_model=str(folder / "other")))


def test_a_new_head_is_on_a_copy_of_the_policy(folder: Path) -> None:
    """Weights of the actor, under a head of the seed, N(0, 1 / sqrt(d + 1)); no model of the run has its memory."""
    config = config_of(folder, reward_model=str(folder / "other"), seed=5)
    checked = check(config)
    with tiny.one_rank():
        models = set_up(config, checked.roles, checked.tokenizer, None)
    assert models.critic is not None
    actor, copied = models.actor.module.lm.model.state_dict(), models.critic.module.backbone.state_dict()
    assert all(torch.equal(weight, copied[name]) for name, weight in actor.items())
    assert {w.data_ptr() for w in actor.values()}.isdisjoint(w.data_ptr() for w in copied.values())
    drawn = torch.empty(1, tiny.WIDTH).normal_(
        0.0, (tiny.WIDTH + 1) ** -0.5, generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(models.critic.module.score.weight, drawn)


def test_a_critic_of_other_scores_starts_from_the_policy(folder: Path) -> None:
    """A reward model that scores nothing here predicts nothing either."""
    scored_by_rule = {"reward_model": None, "reward": ("length,target=5",)}
    config = config_of(folder, **scored_by_rule)
    assert set(inputs(named_roles(config))) == {"actor_model"}
    check(config)
    [line] = notes(config, roles(config))
    assert ", the policy, with a new value head (no score source is the run's reward model)" in line
    judged = config.model_copy(update={"judge": "learned"})
    assert set(inputs(named_roles(judged))) == {"actor_model", "reward_model"}
    named = config_of(folder, reward=("length,target=5",))
    critic = role_of(roles(named), CRITIC)
    assert critic is not None and critic.path == str(folder / "same")
    named = named.model_copy(update={"reward_model": str(folder / "other")})
    critic = role_of(roles(named), CRITIC)
    assert critic is not None and critic.path == str(folder / "policy") and "another tokenizer" in critic.reason
    assert inputs([critic]) == dict.fromkeys(["reward_model", "critic_model"], str(folder / "other"))
    with pytest.raises(UserError, match=r"reward_model not found at .*; run step2_reward first") as refused:
        check(config.model_copy(update={"critic_model": "reward"}))
    assert "--reward-model" in str(refused.value)
    own = (f"learned,model={folder / 'step2_reward'}",)
    assert set(inputs(named_roles(config_of(folder, reward_model=None, reward=own)))) == {"actor_model"}


def test_a_run_with_a_head_on_the_actor_leaves_both_models(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its critic has the actor's backbone, and the next run may start from either."""
    config = config_of(folder, critic_model="shared", output_dir=str(tmp_path), reward=("length,target=5",), patience=3)
    with pytest.raises(UserError, match="critic: got engine options with --critic-model shared"):
        check(config.model_copy(update={"critic": OwnEngineOptions(zero_stage=2)}))
    with pytest.raises(UserError, match=r"--critic-model shared: got it with --tensor-parallel-size 2, expected a"):
        check(config.model_copy(update={"tensor_parallel_size": 2}), ranks=2)
    stage.run(config)
    printed = capsys.readouterr().out
    assert "step3_ppo: the critic is a new value head on the actor" in printed
    assert "note: step3_ppo: no effect: --patience 3 without --keep-best\n" in printed
    out = tmp_path / "step3_ppo"
    weights = {name: load_file(out / name / "model.safetensors") for name in ("actor", "critic")}
    own = {name for name in weights["critic"] if name not in weights["actor"]}
    assert own == {"score.weight"}
    shared = weights["critic"].keys() - own
    assert all(torch.equal(weights["critic"][name], weights["actor"][name]) for name in shared)
    check(config_of(folder, actor_model=str(out), critic_model=str(out), output_dir=str(tmp_path / "next")))


@pytest.mark.parametrize(
    ("option", "family", "problem"),
    [
        ("reward_model", "bart", r"got an encoder-decoder \(bart\)"),
        ("reward", "bart", r"got an encoder-decoder \(bart\)"),
        ("actor_model", "mamba", "got a mamba, expected an attention model"),
        ("actor_model", "vit", "no causal language model of the type vit"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_at_once(
    option: str, family: str, problem: str, folder: Path, tmp_path: Path
) -> None:
    """By the check that the chain calls before its first stage; the model itself is not loaded."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=problem):
        check(config_of(folder, **{option: f"learned,model={tmp_path}" if option == "reward" else str(tmp_path)}))


def test_a_reward_model_must_have_room_for_every_prompt(folder: Path, tmp_path: Path) -> None:
    """The other template writes `BOS w4 w5 ... w6`: four tokens, and a fourth of the context is the user's."""
    other = other_tokenizer()
    ids = {name: getattr(other, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    reward_model(tmp_path / "short", other, "llama", **ids, max_position_embeddings=12)
    reward_model(tmp_path / "tiny", other, "llama", **ids, max_position_embeddings=4)
    (tmp_path / "x.jsonl").write_text("".join(f'{{"prompt": "w{i} {"w5 " * 12}"}}\n' for i in range(4, 90)))
    data = {"data_path": (str(tmp_path / "x.jsonl"),)}
    check(config_of(folder, reward_model=str(tmp_path / "short"), **data))
    for changes in ({"reward_model": str(tmp_path / "tiny")}, {"reward": (f"learned,model={tmp_path}/tiny",)}):
        with pytest.raises(UserError, match=r"tiny': its context is 4 tokens, too few for its chat template and the"):
            check(config_of(folder, **changes, **data))
