"""One frozen base model with four adapters computes what four copies of it with one adapter each compute.

Also in 4 bits, where every product is that of the dequantised weight: the same products on the trunk and on the copies.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf import adapters, rewards
from rlhf.chain import export
from rlhf.config.options import FrozenOptions, OwnEngineOptions, TrainingOptions
from rlhf.engine.ema import BestWeights
from rlhf.engine.export import AdapterAlone, save_policy, save_scalar
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.models import adapter_files
from rlhf.models.adapter_files import reason_against_sharing
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading, load_backbone, load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.quantized import quantized_layers
from rlhf.models.scalar import ScalarModel, load_scalar_model
from rlhf.training import checkpoints
from rlhf.types import ScoredRollout
from step3_ppo import learner as step3_learner
from step3_ppo import models as step3_models
from step3_ppo import stage
from step3_ppo.inputs import check_trunk_roles
from step3_ppo.learner import Learner
from step3_ppo.roles import REWARD_MODEL, named_roles, roles
from step3_ppo.rollout import Reference
from step3_ppo.schedule import Schedule
from step3_ppo.stage import REINFORCEMENT
from tests.rlhf.models.test_quantized import INSTALLED, WIDE, needs_package
from tests.rlhf.rewards.responses import rollout, samples
from tests.support import tiny
from tests.support.plans import workload_of
from tests.support.players import config_of, prompts_to_train_on
from tests.support.resuming import ABOUT

pytestmark = pytest.mark.usefixtures("ranks")

ADAPTER = "lora,r=4"
FP32: Any = TrainingOptions(dtype="fp32")
QUANTIZED = "llama nf4"
ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])

LLAMA = pytest.mark.parametrize("folders", ["llama"], indirect=True)


@dataclass(frozen=True)
class Folders:
    base: str
    policy: str
    reward: str
    quantize: Any = "none"


def disturbed(model: Any, seed: int) -> Any:
    """With every trainable weight moved, as if it had been trained."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=draw)
    return model


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A base model, and what steps 1 and 2 write of adapters on it."""
    out = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    family, _, kind = request.param.partition(" ")
    base = tiny.causal_lm(family, **(WIDE[family] if kind else {}))
    head = ScoreHead(torch.linspace(-1, 1, base.config.hidden_size)[None])
    base.save_pretrained(out / "base")
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(out / "base")
    policy = Policy(disturbed(adapters.wrap(base, ADAPTER), 1))
    backbone = adapters.wrap(load_backbone(str(out / "base"), torch.float32, tiny.VOCAB), ADAPTER)
    reward = disturbed(ScalarModel(backbone, head), 2)
    for name, model, save in (("policy", policy, save_policy), ("reward", reward, save_scalar)):
        (out / name).mkdir()
        save(Engine(model, FP32, 1), AdapterAlone(str(out / "base")), tokenizer, out / name)
    return Folders(*(str(out / name) for name in ("base", "policy", "reward")), kind or "none")


def config(folders: Folders, out: Path, **changes: Any) -> Any:
    paths = {"actor_model": folders.policy, "reward_model": folders.reward, "critic_model": folders.reward}
    # A large epsilon bounds what rounding of a gradient can do to AdamW: lr * error / epsilon a step.
    trunk = {"share_trunk": True, "adapter": ADAPTER, "reward": ("learned",), "adam_epsilon": 1e-3}
    trunk |= {"quantize": folders.quantize}
    return config_of("ppo", **paths, **trunk, total_episodes=16, weight_decay=0.1, output_dir=str(out), **changes)


def scalar_of_peft(folders: Folders) -> ScalarModel:
    """The reward model as plain peft loads it."""
    whole: Any = AutoModelForSequenceClassification.from_pretrained(folders.base, num_labels=1)
    backbone = load_backbone(folders.base, torch.float32, tiny.VOCAB, Loading(quantize=folders.quantize))
    setattr(whole, whole.base_model_prefix, backbone)
    loaded: Any = PeftModel.from_pretrained(whole, folders.reward, is_trainable=True)
    head = loaded.base_model.model.score.modules_to_save["default"].weight
    return ScalarModel(whole.base_model, ScoreHead(head))


def policy_of_peft(folders: Folders) -> Policy:
    lm = load_causal_lm(folders.base, torch.float32, tiny.VOCAB, Loading(quantize=folders.quantize))
    PeftModel.from_pretrained(lm, folders.policy, is_trainable=True)
    return Policy(lm)


def four_copies(config: Any, folders: Folders, together: Learner) -> Learner:
    """The models of step 3 with a base of its own each, loaded by plain peft."""
    of_critic = config.model_copy(update={"learning_rate": config.critic_learning_rate})
    context = replace(together.context, loaded={folders.reward: scalar_of_peft(folders)})
    frozen = FrozenEngine(policy_of_peft(folders), FrozenOptions(), torch.float32)
    return replace(
        together,
        actor=Engine(policy_of_peft(folders), config, 12, "actor"),
        critic=Engine(scalar_of_peft(folders), of_critic, 12, "critic"),
        scorer=replace(
            together.scorer, reference=Reference(frozen), sources=rewards.open_sources(config.reward, context)
        ),
    )


def iterations(learner: Learner, config: Any, first: int = 0) -> Iterator[dict[str, float]]:
    prompts: Any = prompts_to_train_on()
    schedule = Schedule(8, config)
    for _ in range(first):
        next(iter(schedule))
    for metrics in stage.observe(stage.train(learner, prompts, schedule), learner):
        yield {name: x for name, x in metrics.items() if not name.startswith(("seconds_", "tokens_per_second"))}


def weights(engine: Any) -> dict[str, Tensor]:
    """The trained weights by their names without that of the adapter."""
    roles = ("policy", "critic", "default")
    return {
        ".".join(part for part in name.split(".") if part not in roles): weight.clone()
        for name, weight in engine.fp32_weights()
    }


def rollouts_of(monkeypatch: pytest.MonkeyPatch) -> list[ScoredRollout]:
    """A list that gets every scored rollout."""
    scored: list[ScoredRollout] = []
    original = step3_learner.score

    def score(*arguments: Any) -> ScoredRollout:
        scored.append(original(*arguments))
        return scored[-1]

    monkeypatch.setattr(step3_learner, "score", score)
    return scored


@pytest.mark.parametrize(
    ("folders", "checkpointing"),
    [("llama", True), ("gpt2", False), ("gpt_neox", False), pytest.param(QUANTIZED, True, marks=needs_package)],
    indirect=["folders"],
)
def test_one_base_computes_what_four_copies_do(
    folders: Folders, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, options = rollouts_of(monkeypatch), config(folders, tmp_path, gradient_checkpointing=checkpointing)
    together = step3_models.set_up(options, roles(options), tiny.tokenizer(), None)
    apart = four_copies(options, folders, together)
    quantized = [len(quantized_layers(each.actor.module)) for each in (together, apart)]
    assert quantized == ([14, 14] if folders.quantize == "nf4" else [0, 0])
    first = list(iterations(together, options))
    second = list(iterations(apart, options))
    assert len(first) == 2 and first[-1]["kl"] != 0
    for mine, theirs in zip(first, second, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5, nan_ok=True)
    half = len(scored) // 2
    for mine_rollout, their_rollout in zip(scored[:half], scored[half:], strict=True):
        for name in ("response_ids", "logprobs", "ref_logprobs", "scores", "values"):
            one, other = getattr(mine_rollout, name), getattr(their_rollout, name)
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for mine_engine, their_engine in ((together.actor, apart.actor), (together.critic, apart.critic)):
        one, other = weights(mine_engine), weights(their_engine)
        assert {*one} == {*other}
        for name, weight in one.items():
            torch.testing.assert_close(weight, other[name], rtol=0, atol=1e-5)


@LLAMA
def test_the_policy_starts_as_its_reference_and_the_others_never_move(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the first iteration's first step has a ratio other than 1, and only two of the four adapters train. The
    modules are visited once to set them to training mode."""
    options = config(folders, tmp_path)
    models = step3_models.set_up(options, roles(options), tiny.tokenizer(), None)
    lm = models.actor.module.lm
    before = {name: weight.detach().clone() for name, weight in lm.named_parameters()}
    modes: list[bool] = []
    own_train = lm.train
    monkeypatch.setattr(lm, "train", lambda mode=True: (modes.append(mode), own_train(mode)))
    assert not any(module.training for module in lm.modules())
    first = next(iterations(models, options))
    assert modes == [True] and all(module.training for module in lm.modules())
    assert first["kl"] == 0 and first["first_approx_kl"] == 0
    changed = {name for name, weight in lm.named_parameters() if not torch.equal(weight, before[name])}
    trained = {name for name in before if {"policy", "critic"} & {*name.split(".")}}
    assert changed == trained
    assert {*before} - trained and {name for name, weight in lm.named_parameters() if weight.requires_grad} == trained
    with models.scorer.reference.inference(models.actor) as reference:
        plain: Any = AutoPeftModelForCausalLM.from_pretrained(folders.policy)
        torch.testing.assert_close(reference(ROWS)[0], Policy(plain.base_model.model)(ROWS)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("folders", [QUANTIZED if INSTALLED else "llama"], indirect=True)
def test_a_run_resumes_to_the_bit(folders: Folders, tmp_path: Path) -> None:
    """And saves the best policy, that of the first iteration, whichever of both saves it."""
    options = config(folders, tmp_path)
    whole = step3_models.set_up(options, roles(options), tiny.tokenizer(), None)
    run, best = iterations(whole, options), BestWeights(whole.actor)
    next(run)
    best.update()
    first_weights = weights(whole.actor)
    assert checkpoints.save(tmp_path, 1, stage.resumable(whole, {"best": best}, {}), ABOUT, 2) is None
    expected = list(run)
    resumed = step3_models.set_up(options, roles(options), tiny.tokenizer(), None)
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    again = BestWeights(resumed.actor)
    newest.restore(stage.resumable(resumed, {"best": again}, {}), seed=0)
    assert list(iterations(resumed, options, first=1)) == [
        pytest.approx(each, abs=0, rel=0, nan_ok=True) for each in expected
    ]
    for part in ("actor", "critic"):
        saved = {name for name, _ in newest._tensors(part)}
        assert saved and all("lora" in name or "score" in name for name in saved)
    for learner, copy in ((whole, best), (resumed, again)):
        save_policy(learner.actor, AdapterAlone(folders.base), tiny.tokenizer(), tmp_path / "best", copy)
        saved_best = load_file(tmp_path / "best/adapter_model.safetensors")
        assert all(
            torch.equal(saved_best[f"base_model.model.{name[3:]}"], weight) for name, weight in first_weights.items()
        )
    for one, other in ((whole.actor, resumed.actor), (whole.critic, resumed.critic)):
        assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(one).items())


@LLAMA
def test_further_reward_models_are_adapters_too(folders: Folders, tmp_path: Path) -> None:
    """Another one of the same base shares it, a whole model does not; the plan counts one model less."""
    other, whole = str(tmp_path / "other"), str(tmp_path / "whole")
    shutil.copytree(folders.reward, other)
    state = load_file(Path(other) / "adapter_model.safetensors")
    save_file({name: -0.5 * weight for name, weight in state.items()}, Path(other) / "adapter_model.safetensors")
    export.merge(other, Path(whole))
    options = config(folders, tmp_path)
    options = options.model_copy(update={"reward": ("learned", *(f"learned,model={path}" for path in (other, whole)))})
    together = step3_models.set_up(options, roles(options), tiny.tokenizer(), None)
    assert list(together.context.loaded) == [folders.reward, other]
    bases = {id(model.backbone) for model in together.context.loaded.values()}
    assert bases == {id(together.actor.module.lm.base_model)}
    for path in (folders.reward, other):
        alone = load_scalar_model(path, torch.float32, tiny.VOCAB)(ROWS)
        atol = tiny.ORDERS * float(alone.abs().max().detach())
        torch.testing.assert_close(together.context.loaded[path](ROWS), alone, rtol=0, atol=atol)
    by_source = together.scorer.sources(samples(rollout()))[1]
    torch.testing.assert_close(by_source["learned#2"], by_source["learned#3"], rtol=0, atol=1e-5)
    assert not torch.allclose(by_source["learned#1"], by_source["learned#2"], atol=1e-2)
    specs = workload_of(REINFORCEMENT, options, "cpu", {}).models
    assert [role.on_trunk for role in specs if role.part is REWARD_MODEL] == [True, True, False]


@LLAMA
def test_an_adapter_directory_is_a_model_for_peft_and_for_every_command(folders: Folders, tmp_path: Path) -> None:
    """Merged at loading, in fp32, as plain peft computes it with the adapter on."""
    plain: Any = AutoPeftModelForCausalLM.from_pretrained(folders.policy)
    merged = load_causal_lm(folders.policy, torch.float32, tiny.VOCAB)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    expected = Policy(plain.base_model.model)(ROWS)[0]
    atol = tiny.ORDERS * float(expected.abs().max().detach())  # merging changes the order of additions
    torch.testing.assert_close(Policy(merged)(ROWS)[0], expected, rtol=0, atol=atol)
    base = Policy(load_causal_lm(folders.base, torch.float32, tiny.VOCAB))(ROWS)[0]
    assert float((base - expected).abs().max().detach()) > 1e-2
    classifier: Any = AutoPeftModelForSequenceClassification.from_pretrained(folders.reward, num_labels=1)
    scalars = load_scalar_model(folders.reward, torch.float32, tiny.VOCAB)(ROWS)
    ends = ROWS.mask.sum(1) - 1
    ids = ROWS.ids.masked_fill(~ROWS.mask, tiny.PAD)  # transformers reads the score before the padding
    logits = classifier(input_ids=ids, attention_mask=ROWS.mask.long()).logits.squeeze(1)
    torch.testing.assert_close(scalars.gather(1, ends[:, None]).squeeze(1), logits, rtol=0, atol=atol)
    for name, path in (("policy", folders.policy), ("reward", folders.reward)):
        export.merge(path, tmp_path / name)
    merged_lm: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.testing.assert_close(Policy(merged_lm)(ROWS)[0], expected, rtol=0, atol=atol)
    whole: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    merged_logits = whole(input_ids=ids, attention_mask=ROWS.mask.long()).logits.squeeze(1)
    torch.testing.assert_close(merged_logits, logits, rtol=0, atol=atol)
    with pytest.raises(UserError, match="expected a new directory"):
        export.merge(folders.policy, tmp_path / "policy")
    with pytest.raises(UserError, match="got no adapter"):
        export.merge(folders.base, tmp_path / "other")
    state = load_file(Path(folders.reward) / "adapter_model.safetensors")
    assert state["base_model.model.score.weight"].dtype == torch.float32


@pytest.mark.parametrize(("family", "layer"), [("qwen2", "lm_head"), ("qwen2", "embed_tokens"), ("gpt2", "wte")])
def test_an_adapter_on_one_use_of_tied_weights_changes_that_use(family: str, layer: str, tmp_path: Path) -> None:
    """Loaded with its base, and merged in a whole model, whose config says that nothing is tied any more."""
    base, spec = tmp_path / "base", f"lora,r=4,target_modules=[{layer}]"
    tiny.causal_lm(family, tie_word_embeddings=True).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    lm = disturbed(adapters.wrap(load_causal_lm(str(base), torch.float32, tiny.VOCAB), spec), seed=3)
    expected = Policy(lm)(ROWS)[0].detach()
    (tmp_path / "alone").mkdir()
    lm.config.save_pretrained(tmp_path / "alone")
    adapter_files.save(lm, adapter_files.ONLY, str(base), tmp_path / "alone")
    engine = Engine(Policy(lm), FP32, 1)
    (tmp_path / "whole").mkdir()
    save_policy(engine, spec, tiny.tokenizer(), tmp_path / "whole")
    atol = tiny.ORDERS * float(expected.abs().max())
    for name in ("alone", "whole"):
        loaded = load_causal_lm(str(tmp_path / name), torch.float32, tiny.VOCAB)
        torch.testing.assert_close(Policy(loaded)(ROWS)[0], expected, rtol=0, atol=atol)
        assert not loaded.config.tie_word_embeddings


@LLAMA
def test_a_model_of_another_base_is_refused_in_one_line(folders: Folders, tmp_path: Path) -> None:
    """Also before the earlier steps of a chain have made the adapters."""
    none: dict[str, str] = {}
    right = config(folders, tmp_path)
    starts = {"actor_model": folders.base, "reward_model": folders.base, "critic_model": folders.base}

    def check(changes: dict[str, Any], planned: dict[str, str]) -> None:
        changed = right.model_copy(update=changes)
        table = [replace(role, planned=bool(planned)) for role in named_roles(changed)]
        check_trunk_roles(changed, table)

    check({}, none)
    check(starts, starts)
    wrong: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"reward_model": folders.base}, none, "reward model '.*': got whole weights, expected an adapter on the"),
        ({"critic_model": folders.base}, none, "critic model '.*': got whole weights"),
        ({**starts, "reward_model": str(tmp_path)}, starts, "reward model '.*': got an adapter on"),
        ({"adapter": "lora,r=8"}, none, "but --adapter lora,r=8 has other options"),
        ({"reference": FrozenOptions(offload=True)}, none, "reference: got engine options with --share-trunk"),
        ({"critic": OwnEngineOptions(quantize="fp4")}, none, "critic.quantize: got a value for one role"),
        (
            {"actor": OwnEngineOptions(gradient_checkpointing=True)},
            none,
            "actor.gradient_checkpointing: got a value for one role",
        ),
        ({**starts, "actor_model": "demo.yaml"}, starts, "is made with random weights"),
    ]
    for changes, starts_of_models, message in wrong:
        with pytest.raises(UserError, match=message) as refused:
            check(changes, starts_of_models)
        assert "\n" not in str(refused.value)


def test_methods_that_change_the_base_cannot_share_it() -> None:
    for options, problem in (
        (PrefixTuningConfig(), "does not keep several independent adapters"),
        (LoraConfig(init_lora_weights="pissa"), "gives each adapter a base of its own"),
        (LoraConfig(bias="all"), "trains biases of the base model"),
        (None, "does not keep several independent adapters"),
    ):
        assert problem in str(reason_against_sharing(options))
    for fitting in (LoraConfig(), LoraConfig(use_dora=True, use_rslora=True)):
        assert reason_against_sharing(fitting) is None
