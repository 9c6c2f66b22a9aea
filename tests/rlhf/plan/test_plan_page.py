"""The text of a plan, and docs/scaling.md, whose tables are what its commands print."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory
from rlhf.chain import command as train
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.plan import command
from rlhf.plan.activations import PassShape
from rlhf.plan.command import report
from rlhf.plan.devices import Device, PlanOptions
from rlhf.plan.forecast import Forecast, Moment, RolloutWork, Workload, forecast
from rlhf.plan.machine import Machine
from rlhf.plan.zero import Bytes
from rlhf.roles import Role
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from step3_ppo.algorithms.ppo import Config as PPO
from step3_ppo.roles import ACTOR
from step3_ppo.stage import REINFORCEMENT
from tests.support import tiny
from tests.support.plans import bound, workload_of


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    tiny.config_of("llama").save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(**{"dtype": "bf16", **changes})


def four_gpus(memory: float, count: int = 4, host: float = 1e15) -> Machine:
    return Machine(Device("H100", memory, 1e15, 1e14), count, memory, host)


# --- the text


def test_a_plan_tells_whether_it_fits_and_the_shortfall(model_path: str) -> None:
    config = SFTConfig(model=model_path, dtype="bf16")

    def plan_text(memory: str) -> str:
        stages = {"sft": (config, bound(FINE_TUNING, config))}
        machine = PlanOptions.model_validate({"devices": 8, "device_memory": memory, "host_memory": "9GB"})
        return command.format_plans(command.plan_stages(stages, machine, 1))

    assert "step1_sft on 8 x A100, bfloat16" in plan_text("80GB") and "\n  fits\n" in plan_text("80GB")
    assert "does not fit" in plan_text("1MB") and "more on each of 8 devices" in plan_text("1MB")
    assert "disk for all stages" in plan_text("80GB")
    with pytest.raises(UserError, match=r"actor_model not found at .*; run step1_sft first, or name one with --act"):
        bound(REINFORCEMENT, PPO(output_dir="none"))
    assert re.search(r"GB on each device  .*\n.*\n  most at once, of 72.0 GB: update .*, evaluate ", plan_text("80GB"))
    assert re.search(r"most CPU memory: .* GB of 9.00 for each device\n", plan_text("80GB"))


def test_the_cells_of_a_plan_stand_apart(model_path: str) -> None:
    """As of OPT-1.3B on two devices with an offloaded optimizer: `+10.5cpu` is followed by `2.21+1.52cpu`."""
    config = PPO(dtype="bf16", offload_optimizer=True, adapter="lora")
    plan = forecast(
        workload_of(REINFORCEMENT, config, "cuda", {"actor_model": model_path, "reward_model": model_path}),
        four_gpus(80e9),
    )
    wide = Bytes(99.9e9, 99.9e9)
    actor, critic, *rest = plan.models
    memory_of_actor = replace(actor.memory, weights=wide, gradients=wide, optimizer=Bytes(host=99.9e9), buffers=wide)
    big = replace(actor, memory=memory_of_actor, size=replace(actor.size, total=4_055_500_000, trained=33_000_000))
    header, *rows = report(replace(plan, models=(big, critic, *rest))).splitlines()[1:4]
    assert rows[0].startswith("  actor (ZeRO-1, 33.0M of 4,055.5M)  ")
    assert {len(line) for line in rows} == {len(header)}
    assert len(rows[0].split(")")[1].split()) == len(command.COLUMNS)


def test_each_phase_has_the_largest_of_its_moments() -> None:
    """The first number of a moment is on the device, the second in CPU memory, which is the same on a CPU."""
    moments = (("update", 3, 9), ("update", 7, 1), ("generate", 5, 0), ("score", 2, 4), ("score", 4, 1))
    parts = tuple(Moment(phase, f"a {phase}", Bytes(device, host)) for phase, device, host in moments)
    work = Workload("step3_ppo", (), torch.float32, 8, 4, PassShape(4, 24, 8), 2)
    on_gpus = Forecast(work, four_gpus(8.0), (), parts)
    assert list(on_gpus.phase_peaks.items()) == [("generate", 5), ("score", 4), ("update", 7)]
    on_cpu = replace(on_gpus, machine=Machine(Device("cpu", 8.0, 1.0, 1.0), 1, 8.0, 8.0))
    assert on_cpu.phase_peaks == {"generate": 5, "score": 6, "update": 12} and on_cpu.peak == 12


@pytest.mark.parametrize("number", [0.0, 4e6, 6e6, 9.99e9, 9.999e9, 99.94e9, 123.4e9])
def test_gigabytes_have_three_digits(number: float) -> None:
    expected = {
        0.0: "0.00",
        4e6: "<0.01",
        6e6: "0.01",
        9.99e9: "9.99",
        9.999e9: "10.0",
        99.94e9: "99.9",
        123.4e9: "123",
    }
    assert command.gigabytes(number) == expected[number]


def test_a_rollout_has_at_most_a_devices_share_of_the_batch(model_path: str) -> None:
    model = Role(ACTOR, model_path, options())
    workload = Workload(
        "step3_ppo", (model,), torch.bfloat16, 8, 4, PassShape(4, 24, 8, True), 2, RolloutWork(64, 16, 8, 1)
    )
    few, many = (forecast(workload, replace(four_gpus(80e9), count=count)).models[0].cache for count in (1, 8))
    assert few == 8 * many


# --- the page

PAGE = (Path(train.__file__).parents[2] / "docs/scaling.md").read_text(encoding="utf-8")


def test_the_measured_table_is_that_of_the_results() -> None:
    results = json.loads(memory.RESULTS.read_text(encoding="utf-8"))
    assert memory.table(results) in PAGE
    # A run with an adapter needs little memory, of which a third is libraries; the page states that error.
    assert all(abs(run["off"]) <= memory.TARGET for run in results["runs"] if "adapter" not in run["setting"])
    measured = {(run["setting"]["zero_stage"], run["processes"]) for run in results["runs"]}
    assert measured >= {(number, processes) for number in (0, 1, 2, 3) for processes in (1, 2)}


def test_measured_runs_have_the_recorded_prediction(tmp_path: Path) -> None:
    results = json.loads(memory.RESULTS.read_text(encoding="utf-8"))
    for run in results["runs"][:2]:
        options = memory.write_inputs(tmp_path, run["setting"])
        assert memory.predict(options, run["processes"])["predicted"] == run["predicted"]


@pytest.mark.parametrize("text", ["1,5TB", "1.2.3GB", "80,000MB"])
def test_a_size_with_another_point_is_no_byte(text: str) -> None:
    assert PlanOptions.model_validate({"device_memory": "1.5 TB"}).device_memory == 1.5e12
    with pytest.raises(ValueError, match="expected a size such as 80GB"):
        PlanOptions.model_validate({"device_memory": text})
