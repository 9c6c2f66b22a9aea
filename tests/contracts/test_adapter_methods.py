"""Every method of rlhf/adapters, and every variant of LoRA: what wrapping, training, merging and saving must keep."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf import adapters, plugins
from rlhf.chain.options import read
from rlhf.config.options import EngineOptions, OptimizerOptions, SamplingOptions
from rlhf.distributed.zero3 import Shards
from rlhf.engine.export import full_state, save_policy, save_scalar
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading, load_causal_lm, load_config
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel, load_scalar_model
from rlhf.plan import activations
from rlhf.plan.activations import PassShape
from rlhf.plan.sizes import Setup, build
from rlhf.training.checks import check_engine
from step2_reward.__main__ import main as reward_main
from tests.contracts.test_adapters import disturbed, greatest, logprobs
from tests.support import tiny
from tests.support.choice import marked_long

pytestmark = pytest.mark.usefixtures("ranks")

ROWS = tiny.sequences([9, 12, 7, 11], prompts=[3, 4, 1, 2])
PROMPTS = tiny.prompts([3, 5, 4])
SPECS = {
    "lora": "lora,r=4",
    "rslora": "lora,r=4,use_rslora=true",
    "dora": "lora,r=4,use_dora=true",
    "trainable_tokens": "trainable_tokens,token_indices=[5,9,11]",
}
"""for these small layers; other methods have their defaults"""
VIRTUAL = ["p_tuning", "prompt_tuning"]
"""methods that cannot be merged: tests/contracts/test_virtual_tokens.py"""
METHODS = sorted({*SPECS, *plugins.names("rlhf.adapters")}.difference(VIRTUAL))
WHOLE = {"bitfit"}
"""methods that need whole weights before training, and are refused under ZeRO-3"""

QUICK = {"lora", "bitfit", "dora", "ia3", "trainable_tokens"}
"""methods that train in `make test`: one of each kind of parameters"""

each = pytest.mark.parametrize("method", METHODS)


def spec_of(method: str) -> str:
    return SPECS.get(method, method)


def start() -> Any:
    """A model of one layer with biases and tied embeddings, which every method can wrap."""
    return tiny.causal_lm("qwen2", num_hidden_layers=1)


def wrapped(method: str, model: Any) -> Any:
    torch.manual_seed(0)  # of the adapter's first weights
    return adapters.wrap(model, spec_of(method))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=ROWS.ids).logits


@each
def test_start_reference_merge_and_dtype(method: str) -> None:
    """In fp64, where rounding hides nothing."""
    plain = start().double()
    count = sum(weight.numel() for weight in plain.parameters())
    before = logits(plain)
    model = wrapped(method, copy.deepcopy(plain))
    scale = tiny.ORDERS * greatest(before)  # rounding is that of fp32 in norms, and in adapters that are made in fp32
    assert torch.equal(logits(model), before)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    assert trained and frozen >= count - (sum(model.get_parameter(n).numel() for n in trained))
    disturbed(model)
    changed = logits(model)
    assert greatest(changed - before) > 100 * scale
    with adapters.open_adapter(spec_of(method)).disabled(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), changed)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == trained
    merged, state = copy.deepcopy(plain), full_state(model, spec_of(method))
    assert set(state) == set(plain.state_dict())
    merged.load_state_dict(state)
    assert greatest(logits(merged) - changed) <= scale
    assert torch.equal(logits(model), changed)  # merging leaves the model as it was
    rounded = start().to(torch.bfloat16)
    half = wrapped(method, copy.deepcopy(rounded))
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(half), logits(rounded))
    full_state(half, spec_of(method))


OPTIMIZER = OptimizerOptions(learning_rate=1e-2, lr_scheduler_type="constant", warmup_ratio=0)


def policy_engine(method: str, **options: Any) -> Engine:
    model = wrapped(method, start())
    return Engine(
        Policy(model),
        tiny.training_options(EngineOptions(**{"dtype": "fp32", "zero_stage": 0, **options}), OPTIMIZER),
        3,
    )


def train(engine: Engine, steps: int) -> list[float]:
    count = ROWS.loss_mask.sum()
    return [
        engine.step([ROWS[:2], ROWS[2:]], lambda rows: losses.token_nll(engine(rows)[0], rows.loss_mask, count))["loss"]
        for _ in range(steps)
    ]


def respond(engine: Engine) -> Tensor:
    backend = plugins.build("rlhf.generation", {"name": "loop", "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD})
    with engine.inference() as policy:
        responses: Tensor = backend(policy.lm, PROMPTS, SamplingOptions(response_length=6), None).response_ids
    return responses


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the same model, which can be loaded in shards."""
    folder = tmp_path_factory.mktemp("base")
    start().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", [marked_long(method, QUICK) for method in METHODS])
def test_training_resume_saving_and_shards(method: str, base: str, tmp_path: Path) -> None:
    engine = policy_engine(method)
    before = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    losses_at_once = train(engine, 2)
    assert losses_at_once[1] < losses_at_once[0]
    for name, weight in engine.module.named_parameters():
        assert weight.requires_grad or torch.equal(weight, before[name]), name
    tensors = [(name, value.detach().clone()) for name, value in engine.tensors()]
    numbers, responses, third = engine.state_dict(), respond(engine), train(engine, 1)
    resumed = policy_engine(method)
    resumed.load_state_dict(numbers)
    resumed.load_tensors(tensors)
    assert torch.equal(respond(resumed), responses)
    assert train(resumed, 1) == third
    save_policy(engine, spec_of(method), tiny.tokenizer(), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with engine.inference() as policy:
        assert greatest(logprobs(Policy(loaded), ROWS) - logprobs(policy, ROWS)) < 1e-5
    shards = Shards(torch.float32, None)
    if method in WHOLE:
        with pytest.raises(UserError, match="zero-stage 3"):
            check_engine(EngineOptions(zero_stage=3, adapter=spec_of(method)))
        shards = None
    lm = load_causal_lm(base, torch.float32, tiny.VOCAB, Loading(shards=shards))
    options = EngineOptions(dtype="fp32", zero_stage=3, gather_whole=False, gradient_checkpointing=True)
    sharded = Engine(Policy(wrapped(method, lm)), tiny.training_options(options, OPTIMIZER), 3)
    respond(sharded)  # before the first pass of the engine
    assert train(sharded, 2) == pytest.approx(losses_at_once, abs=1e-5)


@pytest.mark.parametrize("method", [marked_long(method, QUICK) for method in METHODS])
def test_a_reward_model_is_saved_and_scores_the_same(method: str, tmp_path: Path) -> None:
    backbone = wrapped(method, tiny.backbone("qwen2", num_hidden_layers=1))
    model = ScalarModel(backbone, ScoreHead(torch.linspace(-1, 1, tiny.WIDTH)[None]))
    engine = Engine(model, tiny.training_options(EngineOptions(dtype="fp32"), OPTIMIZER), 3)
    first = engine.module.score.weight.detach().clone()
    for _ in range(2):
        engine.step([ROWS], lambda rows: (engine(rows)[rows.mask].mean(), {}))
    assert not torch.equal(engine.module.score.weight, first)
    save_scalar(engine, spec_of(method), tiny.tokenizer(), tmp_path)
    loaded = load_scalar_model(str(tmp_path), torch.float32, tiny.VOCAB)
    with engine.inference() as scalar, torch.no_grad():
        # WIDTH states of size 1 times weights up to 1
        assert greatest((loaded(ROWS) - scalar(ROWS))[ROWS.mask]) < tiny.ORDERS * tiny.WIDTH


def test_a_method_has_its_own_learning_rates_unless_the_user_sets_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given.yaml").write_text("actor_model: gpt2\nadapter: ia3\nreward: {learning_rate: 3e-4}\n")
    argv = ["--config", str(tmp_path / "given.yaml"), "--ppo.critic-learning-rate", "0.5", "--sft.adapter", "lora"]
    chain = read(argv)
    # (IA)^3 has 5e-3 where all weights have 2e-5, and the actor's default is 1e-6; LoRA has 2e-4
    assert (chain.sft.learning_rate, chain.reward.learning_rate) == (2e-4, 3e-4)
    assert (chain.ppo.learning_rate, chain.ppo.critic_learning_rate) == (2.5e-4, 0.5)
    assert adapters.describe_rates(chain.ppo) == (
        "learning rate 0.00025 (the default of adapter ia3), critic learning rate 0.5 (as set; adapter ia3 has 0.00125)"
    )
    monkeypatch.setattr("sys.argv", ["step2_reward", "--adapter", "vera", "--print-config"])
    with pytest.raises(SystemExit):
        reward_main()
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["learning_rate"], printed["adapter"]) == (5e-4, "vera")


@pytest.mark.parametrize("method", [*METHODS, *VIRTUAL])
def test_the_compiler_is_for_lora_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.training.checks.require_possible", lambda *_: None)
    options = EngineOptions(adapter=spec_of(method), torch_compile=True)
    if method in ("lora", "rslora"):
        check_engine(options)
    else:
        with pytest.raises(UserError, match="torch-compile"):
            check_engine(options)


@pytest.mark.parametrize("method", [*METHODS, *VIRTUAL])
def test_the_plan_has_its_size_without_weights(method: str) -> None:
    with torch.device("meta"):
        planned = adapters.wrap(start(), spec_of(method))
    real = wrapped(method, start())
    shapes = [
        {name: weight.shape for name, weight in model.named_parameters() if weight.requires_grad}
        for model in (planned, real)
    ]
    assert shapes[0] == shapes[1]


TRACED = ["trainable_tokens,token_indices=[5,9]"]
"""no trained weights in layers"""
ALSO_TRACED = [pytest.param(spec, marks=pytest.mark.long) for spec in ("lora,r=4", "vera")]


@pytest.mark.parametrize("spec", [*TRACED, *ALSO_TRACED])
def test_the_plan_counts_what_a_real_pass_keeps(spec: str) -> None:
    """Within the 8 % that a plan may be off: its pass without data computes attention by another kernel."""
    shape, setup = PassShape(4, 48, 40), Setup(spec)
    config = activations.with_layers(load_config("demo-llama"), 2)
    model, mode = activations._fake_model(config, "lm", setup, torch.float32, False)
    planned = activations._training_peaks(model, mode, "lm", shape)
    real = activations._training_peaks(build(config, "lm", setup).train(), contextlib.nullcontext(), "lm", shape)
    assert planned == pytest.approx(real, rel=0.08)
