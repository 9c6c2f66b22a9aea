"""`--zero-stage auto`, the text of a plan, and docs/scaling.md, whose tables are what its commands print."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import memory, scaling, simulation
from rlhf.chain import command as train
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.plan import choose, command, sizes, table
from rlhf.plan.activations import Passes
from rlhf.plan.machine import Device, Machine
from rlhf.plan.options import PlanOptions
from rlhf.plan.stage import Needs, Player, Rollout, forecast
from step1_sft import plan as sft_plan
from step1_sft.config import SFTConfig
from step3_ppo import plan as ppo_plan
from step3_ppo.algorithms.ppo import Config as PPO
from tests import tiny


@pytest.fixture
def place(tmp_path: Path) -> str:
    tiny.config_of("llama").save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def options(**given: Any) -> EngineOptions:
    return EngineOptions(**{"dtype": "bf16", **given})


def a_machine(memory: float, count: int = 4, host: float = 1e15) -> Machine:
    return Machine(Device("H100", memory, 1e15, 1e14, 3e12, 4e11, 5e10), count, memory, host, 0.4)


# --- the choice


def needs_of(held: EngineOptions) -> Needs:
    return sft_plan.needs(SFTConfig(**{**held.model_dump(), "model": "opt-125m", "max_length": 64}), "H100", {})


def test_the_first_setting_that_fits_is_chosen() -> None:
    start = options()
    all_of_them = list(choose.tried(start, needs_of, a_machine(80e9)))
    assert [choose.said(held) for held, _ in all_of_them] == [
        "--zero-stage 1",
        "--zero-stage 2",
        "--zero-stage 3",
        "--zero-stage 3 --offload-optimizer",
        "--zero-stage 3 --offload-optimizer --offload-param --gradient-checkpointing",
        "--zero-stage 3 --no-gather-whole",
        "--zero-stage 3 --offload-optimizer --no-gather-whole",
        "--zero-stage 3 --offload-optimizer --offload-param --gradient-checkpointing --no-gather-whole",
    ]
    best = float("inf")
    for held, plan in all_of_them:
        chosen, _ = choose.choose(start, needs_of, a_machine(plan.peak))
        assert (chosen == held) == (plan.peak < best)  # one that needs no less than an earlier one is never chosen
        best = min(best, plan.peak)
    with pytest.raises(UserError, match=r"--zero-stage auto: nothing fits; .*GB more on each of 4 devices"):
        choose.settled(Auto(), needs_of, a_machine(best * 0.99))


class Auto(EngineOptions):
    """As the command line gives them."""

    dtype: Any = "bf16"
    zero_stage: Any = "auto"


def test_auto_is_replaced_and_said() -> None:
    held, line = choose.settled(Auto(), needs_of, a_machine(80e9))
    assert held.zero_stage == 1 and line == "step1_sft: --zero-stage auto is --zero-stage 1"
    assert choose.settled(options(zero_stage=3), needs_of, a_machine(80e9)) == (options(zero_stage=3), "")


def test_fp32_begins_without_sharding_and_what_is_asked_for_stays() -> None:
    first = next(choose.tried(options(dtype="fp32"), needs_of, a_machine(80e9)))[0]
    assert first.zero_stage == 0
    asked = [held for held, _ in choose.tried(options(offload_optimizer=True), needs_of, a_machine(80e9))]
    assert all(held.offload_optimizer for held in asked) and asked[0].zero_stage == 1


# --- the text


def test_a_plan_says_whether_it_fits_and_what_is_missing(place: str) -> None:
    def said(memory: str) -> str:
        stages = {"sft": (SFTConfig(model=place, dtype="bf16"), sft_plan.needs)}
        return command.show(stages, PlanOptions(devices=8, device_memory=memory, host_memory="9GB"), 1, {})

    assert "step1_sft on 8 x A100, bfloat16" in said("80GB") and "\n  fits\n" in said("80GB")
    assert "does not fit" in said("1MB") and "more on each of 8 devices" in said("1MB")
    assert "disk for all stages" in said("80GB")


def test_a_model_that_no_stage_makes_is_named(place: str) -> None:
    with pytest.raises(UserError, match="no actor_model: name one"):
        command.show({"ppo": (PPO(), ppo_plan.needs)}, PlanOptions(), 1, {})


def test_a_yaml_shape_of_ones_own(tmp_path: Path) -> None:
    values = {"model_type": "llama", **tiny.FAMILIES["llama"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": values}))
    assert sizes.size(str(tmp_path / "mine.yaml"), "lm").total == sum(p.numel() for p in tiny.causal_lm().parameters())


def test_a_rollout_is_no_larger_than_a_devices_share(place: str) -> None:
    player = Player("actor", place, "lm", options())
    needs = Needs("step3_ppo", (player,), torch.bfloat16, 8, 4, Passes(4, 24, 8, True), 2, Rollout(64, 16, 8, 1, 1))
    few, many = (forecast(needs, replace(a_machine(80e9), count=count)).lines[0].cache for count in (1, 8))
    assert few == 8 * many


# --- the page

PAGE = (Path(train.__file__).parents[2] / "docs/scaling.md").read_text(encoding="utf-8")


def test_the_pages_measured_table_is_that_of_the_results() -> None:
    results = json.loads(memory.RESULTS.read_text(encoding="utf-8"))
    assert memory.table(results) in PAGE
    # With an adapter little is needed, and libraries are a third of it: the page tells how far off that is.
    assert all(abs(run["off"]) <= memory.TARGET for run in results["runs"] if "adapter" not in run["setting"])
    settled = {(run["setting"]["zero_stage"], run["processes"]) for run in results["runs"]}
    assert settled >= {(number, processes) for number in (0, 1, 2, 3) for processes in (1, 2)}


def test_the_page_tells_how_two_processes_scale_and_what_would_follow() -> None:
    found = simulation.result("scaling")
    assert scaling.table(found) in PAGE and simulation.table() in PAGE
    assert [one["sent_over_formula"] for one in found["ranks"]] == pytest.approx([1] * 4, abs=1e-3)


def test_what_was_measured_is_predicted_as_the_results_say(tmp_path: Path) -> None:
    results = json.loads(memory.RESULTS.read_text(encoding="utf-8"))
    for run in results["runs"][:2]:
        options = memory.write_inputs(tmp_path, run["stage"], run["setting"])
        assert memory.predict(run["stage"], options, run["processes"])["predicted"] == run["predicted"]


def test_the_pages_table_of_a_model_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MODELS", ("opt-13b",))
    for line in table.table(table.ppo).splitlines():
        assert line in PAGE


@pytest.mark.long
def test_the_pages_tables_are_what_the_command_prints() -> None:
    assert table.page() in PAGE


def test_the_pages_plans_are_accepted() -> None:
    for line in re.findall(r"^python train.py (.*)$", PAGE, re.MULTILINE):
        known = {
            *PlanOptions.model_fields,
            *train.ChainConfig.model_fields,
            *(f"ppo.{name}" for name in PPO.model_fields),
        }
        assert {word[2:].replace("-", "_") for word in shlex.split(line) if word.startswith("--")} <= known
