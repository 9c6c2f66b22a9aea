"""A plan's numbers against real models, real engines, and sums done by hand."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from rlhf import adapters
from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.errors import UserError
from rlhf.plan import activations, cost, machine, sizes, zero
from rlhf.plan.activations import Passes
from rlhf.plan.machine import Device, Machine
from rlhf.plan.options import PlanOptions, number_of_bytes
from rlhf.plan.report import report
from rlhf.plan.sizes import Size
from rlhf.plan.stage import forecast
from rlhf.plan.zero import Bytes, Site
from step1_sft import plan as sft_plan
from step1_sft.config import SFTConfig
from step2_reward import plan as reward_plan
from step2_reward.config import RewardConfig
from step3_ppo import plan as ppo_plan
from step3_ppo.algorithms.grpo import Config as GRPO
from step3_ppo.algorithms.ppo import Config as PPO
from tests import engine_runs, tiny

SHAPES = sorted(sizes.SHAPES.glob("*.yaml"))
PUBLISHED = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 30e9,
    "opt-66b": 66e9,
    "opt-175b": 175e9,
}
"""Numbers of weights: of the published files where they are known to the last, else the model's name."""


@pytest.fixture
def place(tmp_path: Path) -> str:
    return saved("llama", tmp_path)


def saved(family: str, folder: Path, **changes: Any) -> str:
    """A directory with the config of a tiny model and nothing else."""
    tiny.config_of(family, **changes).save_pretrained(folder / family)
    return str(folder / family)


# --- counts


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_a_shape_has_the_published_number_of_weights(path: Path) -> None:
    published = PUBLISHED[path.stem]
    assert sizes.size(path.stem, "lm").total == pytest.approx(published, rel=0 if isinstance(published, int) else 0.005)


def test_every_published_number_has_a_shape() -> None:
    assert {path.stem for path in SHAPES} == set(PUBLISHED)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_weights_are_those_of_the_real_model(family: str, tmp_path: Path) -> None:
    place, lm, backbone = saved(family, tmp_path), tiny.causal_lm(family), tiny.backbone(family)
    width = getattr(backbone.config, "word_embed_proj_dim", tiny.WIDTH)
    found = sizes.size(place, "lm")
    assert found.total == found.trained == sum(p.numel() for p in lm.parameters())
    assert found.layers == 2 and found.vocabulary == tiny.VOCAB
    assert sizes.size(place, "scalar").total == sum(p.numel() for p in backbone.parameters()) + width
    assert sizes.size(place, "lm", frozen=True).trained == 0


def test_an_adapter_trains_few_weights(place: str) -> None:
    wrapped = adapters.wrap(tiny.causal_lm(), "lora,r=2")
    found = sizes.size(place, "lm", "lora,r=2")
    assert found.total == sum(p.numel() for p in wrapped.parameters())
    assert found.trained == sum(p.numel() for p in wrapped.parameters() if p.requires_grad) < found.total / 5


def test_the_cache_is_that_of_generation(place: str) -> None:
    lm = tiny.causal_lm()
    cache = lm(torch.zeros(3, 7, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert sizes.size(place, "lm").cache * 3 * 7 == held


def test_what_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"no-such-model.*config\.json, or a \.yaml as in"):
        sizes.size("nobody/no-such-model", "lm")
    (tmp_path / "a.yaml").write_text("model: {model_type: llama}")
    with pytest.raises(UserError, match="expected a 'model' mapping with 'model_type' and 'vocab_size'"):
        sizes.size(str(tmp_path / "a.yaml"), "lm")
    with pytest.raises(UserError, match=r"--device H10: expected one of .*did you mean 'H100'"):
        machine.machine(PlanOptions(device="H10"), 1)


# --- activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_holds_what_autograd_saved_and_the_gradient_of_the_head(place: str, dtype: torch.dtype) -> None:
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
    found = activations.activations(place, "lm", None, dtype, False, Passes(4, 32, 20))
    of_logits = 4 * 4 * 20 * tiny.VOCAB
    assert logprobs.requires_grad
    assert sum(saved.values()) - of_logits < found.head < sum(saved.values()) + 8 * of_logits
    assert found.inference < found.head


def test_more_layers_are_traced_as_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, passes = saved("llama", tmp_path, num_hidden_layers=5), Passes(2, 16, 8, entropy=True)
    few = activations.activations(place, "lm", None, torch.float32, False, passes)
    monkeypatch.setattr(activations, "TRACED", (4, 5))
    activations.activations.cache_clear()
    assert activations.activations(place, "lm", None, torch.float32, False, passes) == few
    activations.activations.cache_clear()


def test_checkpointing_and_adapters_hold_less(place: str) -> None:
    def head(adapter: str | None, checkpointing: bool) -> int:
        passes = Passes(4, 64, 1)
        return activations.activations(place, "lm", adapter, torch.float32, checkpointing, passes).head

    assert head(None, True) < head(None, False)
    assert head("lora", True) < head("lora", False)


# --- what DeepSpeed holds


SIZE = Size(total=1000, trained=1000, largest=100, outer=200, layers=2, hidden=8, cache=32, vocabulary=50)


def options(**given: Any) -> EngineOptions:
    return EngineOptions(**{"dtype": "bf16", **given})


@pytest.mark.parametrize(
    ("stage_number", "b", "weights", "optimizer", "gradients", "buffers"),
    [
        (0, 4, 4000, 8000, 4000, 0),
        (1, 4, 4000, 12 * 250, 4000, 0),
        (0, 2, 2000, 12 * 250, 0, 4000),  # below fp32 it is stage 1, which keeps fp32 gradients from step to step
        (1, 2, 2000, 12 * 250, 0, 4000),
        (2, 2, 2000, 12 * 250, 4 * 250, 0),
        (3, 2, 2 * 250, 12 * 250, 0, 4000 + 4 * 250),  # the bucket, and its own gradients
    ],
)
def test_four_ranks_by_hand(
    stage_number: Any, b: int, weights: int, optimizer: int, gradients: int, buffers: int
) -> None:
    found = zero.held(SIZE, options(zero_stage=stage_number), b, Site(4, on_cpu=True))
    assert (found.weights, found.optimizer) == (Bytes(weights), Bytes(optimizer))
    assert (found.gradients, found.buffers) == (Bytes(gradients), Bytes(buffers))


def test_the_moments_of_zero_2_by_hand() -> None:
    found = zero.held(SIZE, options(zero_stage=2), 2, Site(4, on_cpu=True, micro_batches=3))
    assert found.reducing == Bytes(2000 + 2000 + 4000 + 1000)  # the bucket, its flat copy, that in fp32, the sum so far
    assert found.stepping == Bytes(1000 + 800)  # the sum, the largest weight's in fp64
    gpu = zero.held(SIZE, options(zero_stage=2), 2, Site(4, micro_batches=1))
    assert gpu.passing == Bytes(2000) and gpu.reducing == Bytes(2000 + 7000)  # the bucket stands from the start


def test_zero_1_in_fp16_by_hand() -> None:
    """DeepSpeed's optimizer for it is another than in bf16."""
    found = zero.held(SIZE, options(zero_stage=1, dtype="fp16"), 2, Site(4, on_cpu=True))
    assert (found.gradients, found.buffers) == (Bytes(4000), Bytes())
    assert found.reducing == Bytes(4000 + 4000 + 1000)  # the bucket, its flat copy, the sums of its own weights


def test_offload_moves_the_optimizer_to_the_host() -> None:
    found = zero.held(SIZE, options(zero_stage=3, offload_optimizer=True), 2, Site(4))
    assert found.optimizer == Bytes(0, 16 * 250)  # with fp32 gradients
    assert found.weights == Bytes(500) and found.gathered == Bytes(2000)
    parted = zero.held(SIZE, options(zero_stage=3, offload_param=True), 2, Site(4))
    assert parted.weights == Bytes(0, 500)


def test_frozen_models() -> None:
    assert zero.frozen(SIZE, FrozenOptions(), 2, 4).kept == Bytes(2000)
    assert zero.frozen(SIZE, FrozenOptions(zero_stage=3), 2, 4).kept == Bytes(500)
    off = zero.frozen(SIZE, FrozenOptions(offload=True), 2, 4)
    assert (off.kept, off.gathered) == (Bytes(0, 2000), Bytes(2000))


@pytest.mark.parametrize(("stage_number", "times"), [(0, 2), (1, 3), (2, 3), (3, 2)])
def test_what_a_step_sends(stage_number: Any, times: int) -> None:
    sent = zero.exchanged(SIZE, options(zero_stage=stage_number, dtype="fp32"), 4, Site(4))
    assert sent == times * 0.75 * 4000
    assert zero.exchanged(SIZE, options(zero_stage=stage_number), 4, Site(1)) == 0


def test_zero_3_keeps_what_the_backward_pass_uses_soon_again() -> None:
    sent = [zero.exchanged(replace(SIZE, total=n), options(zero_stage=3), 2, Site(2)) for n in (5e8, 1e9, 1e12)]
    own = 2 * SIZE.trained  # half of the gradients, in fp32
    assert sent == pytest.approx([5e8 + own, 1.5e9 + own, 2e12 - 5e8 + own], rel=1e-12)


def test_gradients_are_sent_in_fp32_and_weights_in_bf16() -> None:
    sent = [zero.exchanged(SIZE, options(zero_stage=n), 2, Site(4, micro_batches=3)) for n in (1, 2, 3)]
    assert sent == [0.75 * (8000 + 2000), 0.75 * (8000 * 3 + 2000), 0.75 * (4000 + 2000) * 3]


HELD = [
    *({"dtype": "fp32", "zero_stage": number} for number in (0, 1, 2, 3)),
    *({"dtype": "bf16", "zero_stage": number} for number in (0, 1, 2, 3)),
    {"dtype": "fp32", "zero_stage": 1, "offload_optimizer": True},
    {"dtype": "bf16", "zero_stage": 2, "offload_optimizer": True},
    {"dtype": "bf16", "zero_stage": 3, "offload_optimizer": True},
]


@pytest.mark.parametrize("given", HELD, ids=lambda given: " ".join(map(str, given.values())))
def test_a_real_engine_holds_what_is_said(given: dict[str, Any], place: str) -> None:
    """All storages that tensors of this process have after two steps, less those before, are weights, optimizer and
    buffers; DeepSpeed's bucket of 500 million numbers, of which pages are taken as they are written, is counted as so
    many as the model has."""
    b = 4 if given["dtype"] == "fp32" else 2
    with tiny.one_rank():
        before = set(storages())
        engine = engine_runs.engine(given)
        for rows in engine_runs.batches(2):
            engine_runs.step(engine, rows, size=4)
        made = {key: size for key, size in storages().items() if key not in before}
        del engine
    counts = sizes.size(place, "lm")
    said = zero.held(counts, EngineOptions(**given), b, Site(1, on_cpu=True, micro_batches=2)).kept.total
    assert sum(made.values()) == pytest.approx(said, rel=0.03)


def storages() -> dict[int, int]:
    """The bytes of each by its address. What a compiler keeps of its work has no data."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, FakeTensor) and thing.device.type == "cpu":
            for each in (thing, thing.grad if thing.is_leaf else None):
                if each is not None:
                    found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


# --- stages


def a_machine(memory: float, count: int = 4, host: float = 1e15) -> Machine:
    return Machine(Device("H100", memory, 1e15, 1e14, 3e12, 4e11, 5e10), count, memory, host, 0.4)


def test_the_models_of_step_3(place: str) -> None:
    starts = {"actor_model": place, "reward_model": place}

    def roles(config: Any) -> list[str]:
        return [player.role for player in ppo_plan.needs(config, "cpu", starts).players]

    assert roles(PPO()) == ["actor", "reference", "critic", "reward model"]
    assert roles(PPO(adapter="lora")) == ["actor", "critic", "reward model"]
    assert roles(GRPO(algorithm="grpo", num_generations=4)) == ["actor", "reference", "reward model"]
    assert roles(PPO(reward=("length,target=8",))) == ["actor", "reference", "critic"]


def test_memory_of_step_3_is_that_of_all_models(place: str) -> None:
    needs = ppo_plan.needs(PPO(dtype="bf16"), "H100", {"actor_model": place, "reward_model": place})
    found = forecast(needs, a_machine(80e9))
    kept = sum(line.held.kept.device for line in found.lines)
    assert found.peak > kept and found.fits and found.host == machine.PROGRAM
    assert {moment.name for moment in found.moments} >= {"actor: generate", "critic: step", "reward model: score"}
    rows = 64 / 4
    assert found.lines[0].cache == 2 * sizes.size(place, "lm").cache * rows * (256 + 64)


def test_a_backend_with_memory_of_its_own(place: str) -> None:
    """Its share of all 80 GB while it generates, in the place of the actor's cache; nothing of it at other moments."""

    def moments(**changes: Any) -> dict[str, float]:
        needs = ppo_plan.needs(PPO(dtype="bf16", **changes), "H100", {"actor_model": place, "reward_model": place})
        found = forecast(needs, a_machine(80e9))
        return {moment.name: moment.bytes.device for moment in found.moments}

    loop, vllm = moments(), moments(rollout_backend="vllm,memory_share=0.25")
    assert {name for name in loop if loop[name] != vllm[name]} == {"actor: generate"}
    assert vllm["actor: generate"] == pytest.approx(20e9, abs=1e8)  # the tiny models are nothing beside
    assert moments(rollout_backend="vllm")["actor: generate"] - vllm["actor: generate"] == pytest.approx(12e9)


def test_disk_is_twelve_bytes_a_trained_weight_and_checkpoint(place: str) -> None:
    needs = sft_plan.needs(SFTConfig(model=place, dtype="bf16", keep=3), "H100", {})
    weights = sizes.size(place, "lm").total
    assert forecast(needs, a_machine(80e9)).disk == 12 * weights * 4 + 2 * weights


def test_operations_of_a_forward_pass_by_hand() -> None:
    # 800 weights in layers, 10 tokens; attention 2 * 100 * 8 * 2 layers; the head on 4 columns
    assert cost.forward_flops(SIZE, 3, 10, 4) == 3 * (2 * 800 * 10 + 3200 + 2 * 50 * 8 * 4)


def test_a_budget_of_tokens_is_of_whole_rows_and_of_both_sides_of_pairs() -> None:
    options: dict[str, Any] = {"batch_tokens": 4096, "max_length": 512}
    assert sft_plan.needs(SFTConfig(**options), "cpu", {}).batch == 8
    assert reward_plan.needs(RewardConfig(**options), "cpu", {}).batch == 4


def test_sizes_are_read() -> None:
    assert number_of_bytes("80GB") == 80e9 and number_of_bytes("1.5 GiB") == 1.5 * 2**30
    with pytest.raises(ValueError, match="expected a size such as 80GB"):
        PlanOptions(device_memory="80 apples")


def test_a_plan_tells_what_ranked_lists_add(place: str) -> None:
    """As many micro-batches as pairs ask for, of which a plan that reads no data knows nothing."""
    config = RewardConfig(model=place, batch_size=8, micro_batch_size=2, max_length=16, dtype="fp32")
    text = report(forecast(reward_plan.needs(config, "cpu", {}), machine.machine(PlanOptions(), 1)))
    assert "4 micro-batches of 2 x 16 tokens" in text
    assert "one pair a batch element; a ranked list of K responses has K (K - 1) / 2 pairs" in text
