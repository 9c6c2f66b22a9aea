"""The numbers of a plan against real models, real engines, and sums calculated by hand."""

import gc
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.maths import ops
from rlhf.plan import activations, machine, sizes, zero
from rlhf.plan.activations import PassShape
from rlhf.plan.command import report
from rlhf.plan.devices import Device, PlanOptions
from rlhf.plan.forecast import forecast, stored_size
from rlhf.plan.machine import Machine
from rlhf.plan.sizes import WHOLE, Setup, Size
from rlhf.plan.zero import Bytes, RankLayout
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from step2_reward.config import RewardConfig
from step2_reward.stage import REWARD_MODELLING
from step3_ppo.algorithms.grpo import Config as GRPO
from step3_ppo.algorithms.ppo import Config as PPO
from step3_ppo.stage import REINFORCEMENT
from tests.support import engine_runs, tiny
from tests.support.plans import workload_of


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One path for all tests, so that each shape of its passes is traced once."""
    return saved("llama", tmp_path_factory.mktemp("model"))


def saved(family: str, folder: Path, **changes: Any) -> str:
    """The path of a directory that holds only the config of a tiny model."""
    tiny.config_of(family, **changes).save_pretrained(folder / family)
    return str(folder / family)


# --- activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_memory_is_saved_activations_and_head_gradients(model_path: str, dtype: torch.dtype) -> None:
    lm = tiny.causal_lm().to(dtype).train()
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = lm(torch.zeros(4, 32, dtype=torch.long), use_cache=False, logits_to_keep=20).logits
        logprobs = logits.float().log_softmax(-1)[..., 0]
    shape = PassShape(4, 32, 20, dtype=dtype)
    result = activations.training(model_path, "lm", WHOLE, shape)
    of_logits = 4 * 4 * 20 * tiny.VOCAB
    assert logprobs.requires_grad
    assert sum(saved.values()) - of_logits < result.head < sum(saved.values()) + 8 * of_logits
    assert activations.inference(model_path, "lm", WHOLE, shape) < result.head


def test_a_chance_of_zero_skips_no_layer(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OPT compares its layerdrop in transformers 5.17."""
    arguments = (model_path, "lm", WHOLE, PassShape(2, 16, 8))
    expected = activations.training(*arguments)
    forward = LlamaDecoderLayer.forward

    def sometimes(layer: nn.Module, states: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return states if torch.rand([]) < 0.0 else forward(layer, states, *rest, **named)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", sometimes)
    activations.training.cache_clear()
    traced = activations.training(*arguments)
    assert abs(traced.head - expected.head) < 64  # bytes of the random numbers
    activations.training.cache_clear()


def test_log_probs_and_entropy_copy_no_logits(tmp_path: Path) -> None:
    """Logits and their gradient in bf16, and blocks in fp32: of z, log p and p in the forward pass."""
    model_path, rows, predicted, vocabulary = saved("llama", tmp_path, vocab_size=2**16), 4, 64, 2**16
    shapes = [PassShape(rows, predicted, predicted, name, torch.bfloat16) for name in ("none", "watched", "trained")]
    none, watched, trained = (activations.training(model_path, "lm", WHOLE, shape).head for shape in shapes)
    logits = rows * predicted * vocabulary
    layers = activations.training(model_path, "scalar", WHOLE, shapes[0]).head
    in_bf16, block = 2 * 2 * logits, 4 * ops.logits_at_once("cpu")
    head = 2 * tiny.config_of("llama").hidden_size * vocabulary  # the gradient of its weight
    for peak in (none, watched):
        assert in_bf16 <= peak <= in_bf16 + 3 * block + head + layers
    assert trained - watched > 2 * 4 * logits  # its log-softmax and its product are whole, and in fp32
    assert activations.more_on_gpu(logits) == 3 * 4 * (logits - ops.logits_at_once("cpu"))


def test_checkpointing_and_adapters_need_less_memory(model_path: str) -> None:
    def head(adapter: str | None, checkpointing: bool) -> int:
        shape = PassShape(4, 64, 1, checkpointing=checkpointing)
        return activations.training(model_path, "lm", Setup(adapter), shape).head

    assert head(None, True) < head(None, False)
    assert head("lora", True) < head("lora", False)


# --- what DeepSpeed holds


SIZE = Size(1000, trained=1000, largest=100, outer=200, layers=2, hidden=8, cache=32, vocabulary=50, state=(2000, 0))


def options(**setting: Any) -> EngineOptions:
    return EngineOptions(**{"dtype": "bf16", **setting})


@pytest.mark.parametrize(
    ("stage_number", "b", "weights", "optimizer", "gradients", "buffers"),
    [
        (0, 4, 4000, 8000, 4000, 0),
        (1, 4, 4000, 12 * 250, 4000, 0),
        (
            0,
            2,
            2000,
            12 * 250,
            0,
            4000,
        ),  # in bf16 stage 0 runs as stage 1, which keeps fp32 gradients from step to step
        (1, 2, 2000, 12 * 250, 0, 4000),
        (2, 2, 2000, 12 * 250, 4 * 250, 0),
        (3, 2, 2 * 250, 12 * 250, 0, 4000 + 4 * 250),  # the bucket, and its own gradients
    ],
)
def test_four_ranks_by_hand(
    stage_number: Any, b: int, weights: int, optimizer: int, gradients: int, buffers: int
) -> None:
    result = zero.model_memory(SIZE, options(zero_stage=stage_number), b, RankLayout(4, on_cpu=True))
    assert (result.weights, result.optimizer) == (Bytes(weights), Bytes(optimizer))
    assert (result.gradients, result.buffers) == (Bytes(gradients), Bytes(buffers))


def test_the_moments_of_zero_2_by_hand() -> None:
    result = zero.model_memory(SIZE, options(zero_stage=2), 2, RankLayout(4, on_cpu=True, micro_batches=3))
    assert result.reducing == Bytes(
        2000 + 2000 + 4000 + 1000
    )  # bucket, flat copy, fp32 copy, sum of earlier micro-batches
    assert result.stepping == Bytes(1000)  # the sums
    gpu = zero.model_memory(SIZE, options(zero_stage=2), 2, RankLayout(4, micro_batches=1))
    assert gpu.passing == Bytes(2000) and gpu.reducing == Bytes(2000 + 7000)  # the bucket is allocated from the start


def test_zero_1_in_fp16_by_hand() -> None:
    """DeepSpeed uses another optimizer for fp16 than for bf16."""
    result = zero.model_memory(SIZE, options(zero_stage=1, dtype="fp16"), 2, RankLayout(4, on_cpu=True))
    assert (result.gradients, result.buffers) == (Bytes(4000), Bytes())
    assert result.reducing == Bytes(4000 + 4000 + 1000)  # the bucket, its flat copy, the sums of its own weights


def test_offload_moves_the_optimizer_to_the_host() -> None:
    result = zero.model_memory(SIZE, options(zero_stage=3, offload_optimizer=True), 2, RankLayout(4))
    assert result.optimizer == Bytes(0, 16 * 250)  # with fp32 gradients
    for setting in ({"zero_stage": 3}, {"zero_stage": 2}, {"zero_stage": 1}, {"zero_stage": 2, "dtype": "fp32"}):
        step = zero.model_memory(SIZE, options(offload_optimizer=True, **setting), 2, RankLayout(4)).stepping
        assert step.host == 0, "torch's fused AdamW allocates nothing"
    assert result.weights == Bytes(500) and result.gathered == Bytes(2000)
    offloaded = zero.model_memory(SIZE, options(zero_stage=3, offload_param=True), 2, RankLayout(4))
    assert offloaded.weights == Bytes(0, 500)


def test_frozen_models() -> None:
    assert zero.frozen_memory(SIZE, FrozenOptions(), 2, 4).resident == Bytes(2000)
    assert zero.frozen_memory(SIZE, FrozenOptions(zero_stage=3), 2, 4).resident == Bytes(500)
    off = zero.frozen_memory(SIZE, FrozenOptions(offload=True), 2, 4)
    assert (off.resident, off.gathered) == (Bytes(0, 2000), Bytes(2000))


SETTINGS = [
    *({"dtype": "fp32", "zero_stage": number} for number in (0, 3)),
    *({"dtype": "bf16", "zero_stage": number} for number in (0, 1, 3)),
    {"dtype": "fp32", "zero_stage": 1, "offload_optimizer": True},
    {"dtype": "bf16", "zero_stage": 2, "offload_optimizer": True},
    {"dtype": "bf16", "zero_stage": 3, "offload_optimizer": True},
    {"dtype": "bf16", "zero_stage": 0, "optim": "muon"},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: " ".join(map(str, setting.values())))
def test_a_real_engine_uses_the_planned_memory(setting: dict[str, Any], model_path: str) -> None:
    """The storages that two steps add to this process are weights, optimizer and buffers.

    DeepSpeed's bucket has 500 million numbers, but only written pages use memory: the plan counts as many numbers as
    the model has.
    """
    b = 4 if setting["dtype"] == "fp32" else 2
    importlib.import_module("transformers.optimization")  # logs an exception: in a step, its record would hold tensors
    with tiny.one_rank():
        before = storages()  # alive until the end, so that no address of theirs is given to a new one
        engine = engine_runs.engine(setting)
        for rows in engine_runs.batches(2):
            engine_runs.step(engine, rows, size=4)
        new_bytes = [storage.nbytes() for address, storage in storages().items() if address not in before]
        del engine
    counts = sizes.size(model_path, "lm", Setup(optim=setting.get("optim", "adamw")))
    planned = zero.model_memory(
        counts, EngineOptions(**setting), b, RankLayout(1, on_cpu=True, micro_batches=2)
    ).resident.total
    assert sum(new_bytes) == pytest.approx(planned, rel=0.03)


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage by its address. Fake tensors, which a compiler keeps, have no storage."""
    gc.collect()
    result: dict[int, torch.UntypedStorage] = {}
    for candidate in gc.get_objects():
        if (
            isinstance(candidate, torch.Tensor)
            and not isinstance(candidate, FakeTensor)
            and candidate.device.type == "cpu"
        ):
            for each in (candidate, candidate.grad if candidate.is_leaf else None):
                if each is not None:
                    result[each.untyped_storage().data_ptr()] = each.untyped_storage()
    return result


# --- stages


def four_gpus(memory: float, count: int = 4, host: float = 1e15) -> Machine:
    return Machine(Device("H100", memory, 1e15, 1e14), count, memory, host)


def test_the_models_of_step_3(model_path: str) -> None:
    model_paths = {"actor_model": model_path, "reward_model": model_path}

    def roles(config: Any) -> list[str]:
        return [model.part.name for model in workload_of(REINFORCEMENT, config, "cpu", model_paths).models]

    assert roles(PPO()) == ["actor", "reference", "critic", "reward model"]
    assert roles(PPO(adapter="lora")) == ["actor", "critic", "reward model"]
    assert roles(GRPO(algorithm="grpo", num_generations=4)) == ["actor", "reference", "reward model"]
    assert roles(PPO(reward=("length,target=8",))) == ["actor", "reference", "critic"]
    del model_paths["reward_model"]
    assert roles(PPO(reward=("length,target=8",), critic_model="policy")) == ["actor", "reference", "critic"]
    own = GRPO(algorithm="grpo", num_generations=4, reward=(f"learned,model={model_path}",))
    assert roles(own) == ["actor", "reference", "reward model"]


def test_memory_of_step_3_is_that_of_all_models(model_path: str) -> None:
    workload = workload_of(
        REINFORCEMENT, PPO(dtype="bf16"), "H100", {"actor_model": model_path, "reward_model": model_path}
    )
    result = forecast(workload, four_gpus(80e9))
    resident = sum(model.memory.resident.device for model in result.models)
    assert result.peak > resident and result.fits and result.host_peak == machine.PROGRAM
    assert {moment.name for moment in result.moments} >= {"actor: generate", "critic: step", "reward model: score"}
    rows = 64 / 4
    assert (
        result.models[0].cache == 2 * sizes.size(model_path, "lm").cache * rows * 384
    )  # 256 + 64, as a multiple of 128


def test_one_model_at_a_time_is_gathered_to_score(model_path: str) -> None:
    """Step 3 leaves the actor's `inference()` before the reference's: by hand, what stays, the weights of one model in
    bf16, and its activations."""
    paths = {"actor_model": model_path, "reward_model": model_path}
    result = forecast(workload_of(REINFORCEMENT, PPO(dtype="bf16", zero_stage=3), "H100", paths), four_gpus(80e9))
    resident = sum(model.memory.resident.device for model in result.models)
    moments = {moment.name: moment.bytes.device for moment in result.moments}
    for model in result.models:
        scoring = resident + 2 * model.size.total + model.activations.inference
        assert moments[f"{model.role.part.name}: score"] == scoring, model.role.part.name


def test_passes_without_gradients_have_rows_of_their_own(model_path: str) -> None:
    """The logits of a fine-tuned row are those of 511 tokens, in bf16."""

    def evaluation(rows: int | None) -> float:
        config = SFTConfig(model=model_path, dtype="bf16", micro_batch_size=2, eval_batch_size=rows, max_length=512)
        (model,) = forecast(workload_of(FINE_TUNING, config, "H100", {}), four_gpus(80e9)).models
        return model.activations.inference

    logits = 2 * 511 * sizes.size(model_path, "lm").vocabulary
    assert evaluation(64) - evaluation(8) >= 56 * logits
    assert evaluation(None) == evaluation(2)


def test_a_backend_with_its_own_memory(model_path: str) -> None:
    """While it generates, its share of the 80 GB replaces the actor's cache; other moments do not change."""

    def moments(**changes: Any) -> dict[str, float]:
        workload = workload_of(
            REINFORCEMENT, PPO(dtype="bf16", **changes), "H100", {"actor_model": model_path, "reward_model": model_path}
        )
        result = forecast(workload, four_gpus(80e9))
        return {moment.name: moment.bytes.device for moment in result.moments}

    loop, vllm = moments(), moments(rollout_backend="vllm,memory_share=0.25")
    assert {name for name in loop if loop[name] != vllm[name]} == {"actor: generate"}
    assert vllm["actor: generate"] == pytest.approx(20e9, abs=1e8)  # the tiny models are nothing beside
    assert moments(rollout_backend="vllm")["actor: generate"] - vllm["actor: generate"] == pytest.approx(12e9)


def test_a_checkpoint_has_twelve_bytes_per_trained_weight(model_path: str) -> None:
    workload = workload_of(FINE_TUNING, SFTConfig(model=model_path, dtype="bf16", keep=3), "H100", {})
    weights = sizes.size(model_path, "lm").total
    assert forecast(workload, four_gpus(80e9)).disk == 12 * weights * 4 + 2 * weights
    best = SFTConfig(model=model_path, dtype="bf16", keep=3, eval_every=5, keep_best="eval_perplexity")
    plan = forecast(workload_of(FINE_TUNING, best, "H100", {}), four_gpus(80e9))
    assert plan.disk == 16 * weights * 4 + 2 * weights  # the best weights too, in fp32

    def disk(**changes: Any) -> float:
        policy = PPO(dtype="bf16", keep=3, eval_every=5, **changes)
        paths = {"actor_model": model_path, "reward_model": model_path}
        return forecast(workload_of(REINFORCEMENT, policy, "H100", paths), four_gpus(80e9)).disk

    copy = 4 * weights * 4 + 2 * weights
    assert disk(keep_best="eval_score") - disk() == disk(ema_decay=0.9) - disk() == copy
    assert disk(keep_best="eval_score", ema_decay=0.9) - disk() == 2 * copy


def test_every_copy_of_the_weights_is_in_memory_all_the_time(model_path: str) -> None:
    """Four bytes for each trained weight, on four ranks a fourth of it; in all moments of all stages that have one."""
    machine, weights = four_gpus(80e9), sizes.size(model_path, "lm").total
    paths = {"actor_model": model_path, "reward_model": model_path}

    def moments(**changes: Any) -> dict[str, float]:
        config = PPO(dtype="bf16", eval_every=5, **changes)
        return {
            m.name: m.bytes.device for m in forecast(workload_of(REINFORCEMENT, config, "H100", paths), machine).moments
        }

    without = moments()
    for changes, copies in (({"ema_decay": 0.9}, 1), ({"keep_best": "eval_score", "ema_decay": 0.9}, 2)):
        grown = {name: value - without[name] for name, value in moments(**changes).items()}
        assert grown == dict.fromkeys(without, 4 * copies * math.ceil(weights / 4))
    for stage, kind, metric in (
        (FINE_TUNING, SFTConfig, "eval_perplexity"),
        (REWARD_MODELLING, RewardConfig, "eval_accuracy"),
    ):
        options: dict[str, Any] = {"model": model_path, "dtype": "bf16", "eval_every": 5}
        peaks = [
            forecast(workload_of(stage, kind(**options, **more), "H100", {}), machine).peak
            for more in ({}, {"keep_best": metric})
        ]
        trained = forecast(workload_of(stage, kind(**options), "H100", {}), machine).models[0].size.trained
        assert peaks[1] - peaks[0] == 4 * math.ceil(trained / 4)


def test_a_token_budget_counts_whole_rows_and_both_sides_of_pairs() -> None:
    options: dict[str, Any] = {"batch_tokens": 4096, "max_length": 512}
    assert workload_of(FINE_TUNING, SFTConfig(**options), "cpu", {}).batch == 8
    assert workload_of(REWARD_MODELLING, RewardConfig(**options), "cpu", {}).batch == 4


def test_a_plan_notes_the_cost_of_ranked_lists(model_path: str) -> None:
    """A plan reads no data, so it counts one pair per row and notes that ranked lists have more."""
    config = RewardConfig(model=model_path, batch_size=8, micro_batch_size=2, max_length=16, dtype="fp32")
    text = report(
        forecast(workload_of(REWARD_MODELLING, config, "cpu", {}), machine.describe_machine(PlanOptions(), 1))
    )
    assert "4 micro-batches of 2 x 16 tokens" in text
    assert "one pair a row is assumed; a ranked list of K responses is K (K - 1) / 2 pairs" in text


def test_a_shared_trunk_is_one_base_model_and_four_adapters(model_path: str) -> None:
    """By hand: the weights of one model in bf16, four adapters and two heads of 32 numbers; Adam's states of two."""
    options: dict[str, Any] = {"actor_model": None, "share_trunk": True, "adapter": "lora,r=4", "dtype": "bf16"}
    workload = workload_of(
        REINFORCEMENT, PPO(**options), "cpu", {"actor_model": model_path, "reward_model": model_path}
    )
    assert [role.part.name for role in workload.models] == ["actor", "reference", "critic", "reward model"]
    base = sizes.size(model_path, "lm").total
    adapter = sizes.size(model_path, "lm", Setup("lora,r=4")).trained
    stored = [stored_size(role) for role in workload.models]
    assert [size.total for size in stored] == [base + adapter, adapter, adapter + tiny.WIDTH, adapter + tiny.WIDTH]
    assert [size.trained for size in stored] == [adapter, 0, adapter + tiny.WIDTH, 0]
    plan = forecast(workload, machine.describe_machine(PlanOptions(device="cpu", devices=1), 1))
    weights = sum(model.memory.weights.total for model in plan.models)
    assert weights == 2 * (base + 4 * adapter + 2 * tiny.WIDTH)
    quantized = workload_of(
        REINFORCEMENT, PPO(**options, quantize="nf4"), "cpu", {"actor_model": model_path, "reward_model": model_path}
    )
    assert [stored_size(role).weight_bytes(2) for role in quantized.models[1:]] == [
        2 * size.total for size in stored[1:]
    ]
    assert plan.disk < 2 * base + 3 * 4 * 3 * 2 * (adapter + tiny.WIDTH)  # models are saved as adapters
