"""Which options of an engine go together on which device, and how each model of step 3 gets its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import kernels
from rlhf.chain import command as train
from rlhf.config import parser
from rlhf.config.options import EngineOptions, FrozenOptions, OwnEngineOptions, TrainingOptions
from rlhf.engine import training
from rlhf.engine.precision import compute_dtype
from rlhf.engine.training import deepspeed_config, require_possible, shards_of
from rlhf.errors import UserError
from step3_ppo.algorithms.ppo import Config as PPOConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_layers_are_compiled_where_no_devices_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(kernels, "require_compiler", devices.append)
    require_possible(EngineOptions(torch_compile=True, zero_stage=2, dtype="bf16"), GPU)
    for more in ({"zero_stage": 3}, {"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}):
        with pytest.raises(UserError, match="--torch-compile: expected --zero-stage 0, 1 or 2"):
            require_possible(EngineOptions(torch_compile=True, **more), CPU)  # type: ignore[arg-type]
    require_possible(EngineOptions(), CPU)
    assert devices == [GPU]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"torch_compile": True, "zero_stage": 2}, True),
        ({"torch_compile": False}, False),
        ({"zero_stage": 3}, False),
        ({"tensor_parallel_size": 2}, False),
        ({"sequence_parallel_size": 2}, False),
        ({"quantize": "nf4"}, False),
    ],
    ids=str,
)
def test_rollouts_on_a_gpu_are_compiled_where_weights_are_whole(options: dict[str, Any], expected: bool) -> None:
    assert training._decodes_compiled(EngineOptions(**options)) is expected


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_bf16_is_chosen_where_the_cpu_multiplies_in_it(
    avx512: bool, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("auto", None)):
        chosen = expected or (torch.bfloat16 if avx512 or amx else torch.float32)
        assert compute_dtype(EngineOptions(dtype=dtype), CPU) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [
        ((6, 1), torch.float32),
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
    ],
)
def test_auto_on_a_gpu_is_what_its_tensor_cores_multiply(
    capability: tuple[int, int], chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's compute capabilities: Pascal has none, V100 and T4 have fp16 only, from Ampere on there is bf16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute_dtype(EngineOptions(), GPU) == chosen
    assert compute_dtype(EngineOptions(dtype="fp32"), GPU) == torch.float32
    assert compute_dtype(EngineOptions(dtype="bf16"), GPU) == torch.bfloat16


@pytest.mark.parametrize("there", [True, False])
def test_an_nvme_folder_needs_asynchronous_reads(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    class Builder:
        def is_compatible(self, verbose: bool) -> bool:
            return there

    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda name: Builder() if "IO" in name else None)
    options = TrainingOptions(zero_stage=3, offload_param=True, offload_optimizer=True, offload_nvme=str(tmp_path))
    if not there:
        with pytest.raises(UserError, match=r"install libaio with its headers \(libaio-dev\)"):
            require_possible(options, CPU)
        return
    require_possible(options, CPU)
    settings = deepspeed_config(options, torch.float32, 10)["zero_optimization"]
    assert settings["offload_param"] == settings["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path)}
    shards = shards_of(options.model_copy(update={"dtype": "fp32"}))
    assert shards is not None and shards.offload == settings["offload_param"]


# --- each model its own


def parsed(*argv: str) -> Any:
    return train.read([*argv]).ppo


def test_models_of_step_3_are_held_each_its_own_way() -> None:
    ppo = parsed(
        "--zero-stage", "2", "--gradient-checkpointing", "--ppo.actor.zero-stage", "3", "--ppo.actor.offload-param",
        "--ppo.critic.no-gradient-checkpointing", "--ppo.reference.offload",
    )  # fmt: skip
    actor, critic = ppo.actor.override(ppo), ppo.critic.override(ppo)
    assert (actor.zero_stage, actor.offload_param, actor.gradient_checkpointing) == (3, True, True)
    assert (critic.zero_stage, critic.offload_param, critic.gradient_checkpointing) == (2, False, False)
    assert type(actor) is type(ppo) and actor.learning_rate == ppo.learning_rate
    assert ppo.reference.follow(actor) == FrozenOptions(zero_stage=3, offload=True, gather_whole=True, quantize="none")
    assert ppo.reward_models.follow(critic) == FrozenOptions(
        zero_stage=0, offload=False, gather_whole=True, quantize="none"
    )


def test_what_is_set_for_a_frozen_model_stands() -> None:
    trained = EngineOptions(zero_stage=3, gather_whole=False)
    follows = FrozenOptions(zero_stage=3, gather_whole=False, quantize="none")
    assert FrozenOptions().follow(trained) == follows
    assert FrozenOptions(zero_stage=0).follow(trained).zero_stage == 0
    assert FrozenOptions(zero_stage=3).follow(EngineOptions(zero_stage=1)).zero_stage == 3
    assert OwnEngineOptions().override(trained) == trained


def test_a_file_and_the_saved_tree_say_it_too(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "zero-stage: 1\nppo:\n  critic: {zero-stage: 3, offload-optimizer: false}\n  reference: {offload: on}\n"
    )
    ppo = parsed("--config", str(own), "--offload-optimizer", "--ppo.critic.zero-stage", "2")
    assert ppo.critic == OwnEngineOptions(zero_stage=2, offload_optimizer=False)
    assert ppo.critic.override(ppo).offload_optimizer is False and ppo.actor.override(ppo).offload_optimizer is True
    saved = tmp_path / "saved.yaml"
    saved.write_text(parser.to_yaml(ppo))
    assert parser.parse(PPOConfig, ["--config", str(saved)], "", "") == ppo
