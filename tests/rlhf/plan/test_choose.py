"""Devices, the first setting that fits, `--zero-stage auto`, and the command that a plan proposes."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.chain import command as train
from rlhf.chain import planning
from rlhf.chain.options import SECTIONS
from rlhf.chain.stages import load
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.launch import launcher
from rlhf.plan import choose, command, machine
from rlhf.plan.devices import DEVICES, SLOW_BF16, Device, PlanOptions, device_of_driver, device_of_kind
from rlhf.plan.forecast import Forecast, Workload, forecast
from rlhf.plan.machine import Machine, describe_machine
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from step3_ppo.algorithms.ppo import Config as PPO
from tests.support import tiny
from tests.support.plans import bound, workload_of

ALL_RECIPES = (Path(train.__file__).parents[2] / "configs/recipes").glob("*.yaml")
QUICK = ("opt-1.3b-2x3090", "opt-1.3b-8xa100", "opt-1.3b-a100")
"""recipes that the suite checks; the others are for make test-long"""
PAGE = Path(train.__file__).parents[2] / "docs/models.md"
CARDS = {"24gb": 24e9, "80gb": 80e9, "8x80gb": 80e9}
RECIPES = [
    pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.long)
    for path in sorted(ALL_RECIPES)
    if not path.stem.endswith("-cpu") and path.stem not in CARDS
]
ROWS = re.findall(
    r"^\| `(\S+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", PAGE.read_text().split("its reward model")[1], re.M
)
PLANNED = [
    pytest.param(recipe, model, numbers, reward_model.strip("`"),
                 marks=() if (recipe, model) == ("24gb", "llama-3.2-1b") else pytest.mark.long)
    for model, *columns, reward_model in ROWS
    for recipe, numbers in zip(CARDS, columns, strict=True)
    if numbers
]  # fmt: skip
"""the table of recipes: (recipe, model, GB of three steps, reward model of 8x80gb)"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One path for all tests, so that each shape of its passes is traced once."""
    folder = tmp_path_factory.mktemp("llama")
    tiny.config_of("llama").save_pretrained(folder)
    return str(folder)


def gpus(memory: float, count: int = 4, host: float = 1e15) -> Machine:
    return Machine(Device("H100", memory, 1e15, 1e14), count, memory, host)


def sft(model_path: str, **changes: Any) -> SFTConfig:
    return SFTConfig(**{"model": model_path, "dtype": "bf16", "max_length": 64, "micro_batch_size": 4, **changes})


def workload(candidate: Any) -> Workload:
    return workload_of(FINE_TUNING, candidate, "H100", {})


# --- devices


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX-4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_device_is_known_by_the_name_of_its_driver(name: str, kind: str | None) -> None:
    device = device_of_driver(name)
    assert (device and device.kind) == kind


def test_a_device_is_named_in_full_or_by_the_part_that_only_it_has() -> None:
    for name, kind in {
        "3090": "RTX-3090",
        "mi300": "MI300X",
        "a10": "A10",
        "a6000": "A6000",
        "h200": "H200",
        "h100": "H100",
        "h100-pcie": "H100-PCIe",
    }.items():
        assert device_of_kind(name).kind == kind
    for unknown in ("H10", "RTX", "4"):
        with pytest.raises(UserError, match=f"--device {unknown}: expected one of B200, .*, cpu"):
            device_of_kind(unknown)
    for typo in ("H10", "h1000"):
        with pytest.raises(UserError, match="did you mean 'H100'"):
            describe_machine(PlanOptions(device=typo), 1)
    assert len({device.kind for device in DEVICES}) == len(DEVICES) and {"V100", "V100-16GB", "T4"} == SLOW_BF16
    for device in DEVICES:  # units: GB, TFLOP/s
        assert 16e9 <= device.memory <= 256e9 and 60e12 < device.flops < 2500e12 and device.flops_fp32 < device.flops


@pytest.mark.parametrize(("devices", "processes", "local", "sharing"), [
    (None, 1, None, 1), (None, 4, None, 4), (4, 1, None, 4), (None, 4, "2", 2), (4, 1, "2", 4),
])  # fmt: skip
def test_processes_on_cpus_share_the_machine(
    devices: int | None, processes: int, local: str | None, sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8e9))
    monkeypatch.setattr(launcher, "cores", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    target = describe_machine(PlanOptions(device="cpu", devices=devices), processes)
    assert target.count == (devices or processes) and target.memory == 8e9 / sharing
    assert target.device.flops == machine.CORE.flops * 8 / sharing
    assert target.device.flops_fp32 == machine.CORE.flops_fp32 * 8 / sharing


@pytest.mark.parametrize(("named", "host", "assumed"), [
    ({"device": "H100", "devices": 8}, 160e9, True), ({"device_memory": "24GB"}, 48e9, True),
    ({"device": "H100", "host_memory": "9GB"}, 9e9, False), ({"device": "cpu", "devices": 2}, 4e9, False),
])  # fmt: skip
def test_a_laptop_has_not_the_memory_of_the_machine_that_is_planned(
    named: dict[str, object], host: float, assumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8e9))
    target = describe_machine(PlanOptions.model_validate(named), 1)
    assert (target.host, target.assumed_host) == (host, assumed)


# --- the choice


def test_settings_change_memory_and_speed_only(model_path: str) -> None:
    start = sft(model_path)
    settings = list(choose.candidates(start, gpus(80e9)))
    assert len({setting.model_dump_json() for setting in settings}) == len(settings) == (4 + 3 + 3) * (1 + 3)
    changed = {name for setting in settings for name in parser.changed(setting, start)}
    assert changed == {"zero_stage", "offload_optimizer", "offload_param", "gather_whole", "gradient_checkpointing",
                       "micro_batch_size"}  # fmt: skip
    assert changed <= SFTConfig.declared("FREE")
    assert {setting.micro_batch_size for setting in settings} == {4, 2, 1}
    large = choose.candidates(sft(model_path, eval_batch_size=64), gpus(80e9))
    assert {(setting.micro_batch_size, setting.eval_batch_size) for setting in large} == {
        (4, 64), (2, 32), (1, 16), (1, 8), (1, 4), (1, 2), (1, 1)}  # fmt: skip
    alone = list(choose.candidates(start, gpus(80e9, count=1)))
    assert {setting.zero_stage for setting in alone if not setting.offload_optimizer} == {1}
    on_cpu = list(choose.candidates(start, describe_machine(PlanOptions(device="cpu"), 2)))
    assert not any(setting.offload_optimizer or setting.offload_param for setting in on_cpu)


def test_what_the_user_has_switched_on_stays_on(model_path: str) -> None:
    start = sft(model_path, offload_optimizer=True, gradient_checkpointing=True)
    settings = list(choose.candidates(start, gpus(80e9)))
    assert all(setting.offload_optimizer and setting.gradient_checkpointing for setting in settings)


def test_step_3_halves_its_rollout_and_offloads_frozen_models(model_path: str) -> None:
    start = PPO(dtype="bf16", rollout_batch_size=8, micro_batch_size=1)
    settings = list(choose.candidates(start, gpus(80e9)))
    assert {setting.rollout_batch_size for setting in settings} == {8, 4, 2, 1}
    assert {(setting.reference.offload, setting.reward_models.offload) for setting in settings} == {
        (False, False),
        (True, True),
    }


def test_the_first_setting_that_fits_is_chosen(model_path: str) -> None:
    """The property that defines the choice, for memories from plenty to none: what comes before it does not fit."""
    start = sft(model_path)
    settings = [setting for setting in choose.candidates(start, gpus(80e9)) if setting.zero_stage]  # bf16: 0 is 1
    plans = [forecast(workload(setting), gpus(80e9)) for setting in settings]
    peaks = sorted({plan.peak for plan in plans})
    for memory in (peaks[-1], peaks[len(peaks) // 2], peaks[len(peaks) // 4], peaks[0]):
        setting, chosen = choose.choose(start, workload, gpus(memory))
        fitting = [each for each, plan in zip(settings, plans, strict=True) if plan.peak <= memory]
        assert chosen.fits and setting == fitting[0]
    _, chosen = choose.choose(start, workload, gpus(peaks[0] * 0.99))
    assert not chosen.fits


def test_an_optimizer_of_whole_weights_has_no_settings_that_shard_them(model_path: str) -> None:
    alone, plan = choose.choose(sft(model_path, optim="muon"), workload, gpus(80e9, count=1))
    assert plan.fits and not alone.offload_optimizer
    several, _ = choose.choose(sft(model_path, optim="muon", dtype="fp32"), workload, gpus(80e9))
    assert several.zero_stage == 0
    with pytest.raises(UserError, match="--optim muon: got --zero-stage 1 with 4 processes"):
        choose.choose(sft(model_path, optim="muon"), workload, gpus(80e9))


def test_auto_on_a_card_without_bf16_is_planned_as_fp16(model_path: str) -> None:
    """Its optimizer has other buffers than that of bf16, and splits the state of one process too."""

    def work(candidate: Any) -> Workload:
        return workload_of(FINE_TUNING, candidate, "T4", {})

    auto, fp16, bf16 = (forecast(work(sft(model_path, dtype=dtype)), gpus(16e9)) for dtype in ("auto", "fp16", "bf16"))
    assert auto.workload.dtype == torch.float16
    assert auto.moments == fp16.moments != bf16.moments
    with pytest.raises(UserError, match="--optim muon: got --zero-stage 1 with 1 process, expected whole weights"):
        choose.choose(sft(model_path, optim="muon", dtype="auto"), work, gpus(16e9, count=1))


class Auto(SFTConfig):
    """Options with `auto`, as the command line makes them."""

    zero_stage: Any = "auto"


def test_auto_is_replaced_and_reported(model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    auto = Auto(**sft(model_path).model_dump(exclude={"zero_stage"}))

    def resolved_on(options: SFTConfig, memory: str) -> Any:
        named = {"device": "H100", "devices": 4, "device_memory": memory, "host_memory": "9GB"}
        cards = PlanOptions.model_validate(named)
        return command.resolve_zero_stage(options, bound(FINE_TUNING, options), cards, 1)

    chosen = resolved_on(auto, "80GB")
    assert capsys.readouterr().out == f"step1_sft: --zero-stage auto is --zero-stage {chosen.zero_stage}\n"
    assert chosen == auto.model_copy(update={"zero_stage": chosen.zero_stage})
    with pytest.raises(UserError, match=r"--zero-stage auto: nothing fits; .*GB more on each of 4 devices.*--adapter"):
        resolved_on(auto, "10KB")


@pytest.mark.parametrize(("kind", "memory"), [("cpu", 8e9), ("H100", 80e9)])
def test_one_process_keeps_what_only_zero_3_has(kind: str, memory: float, model_path: str) -> None:
    """Nothing is divided there, but a user who switches it on must get an answer, and no more than was asked for."""
    alone = Machine(Device(kind, memory, 1e15, 1e14), 1, memory, 9e9)
    start = sft(model_path, gather_whole=False)
    chosen, plan = choose.choose(start, workload, alone)
    assert plan.fits and choose.as_flags(chosen, start) == "--zero-stage 3"


# --- the proposal


def plan_text(model_path: str, memory: str, host: str, *argv: str) -> str:
    """What `train.py --plan` prints for step 1 on one GPU; Python and the libraries take 0.65 GB of the host."""
    words = ["--actor-model", model_path, "--reward-model", model_path, "--dtype", "bf16", "--steps", "1"]
    words += ["--sft.max-length", "64", "--sft.micro-batch-size", "4", *argv]
    words += ["--plan", "--device=3090", "--device-memory", memory, "--host-memory", host]
    chain = train.read(words)
    return planning.forecast(chain, 1, "python train.py", words)


def resolved(*words: str) -> Any:
    return train.read([*words])


@pytest.mark.parametrize(("memory", "offloads"), [("24GB", False), ("0.6MB", True)])
def test_the_proposed_command_sets_the_first_setting(memory: str, offloads: bool, model_path: str) -> None:
    text = plan_text(model_path, memory, "9GB")
    line = text.split("a command that fits:\n")[1].partition("\n\nmost on a device with LoRA: ")[0]
    assert (
        "\n" not in line
        and line.startswith("python train.py --actor-model")
        and "--device" not in line
        and "--plan" not in line
    )
    by_words = resolved(*shlex.split(line)[2:])
    assert by_words.sft.offload_optimizer == offloads
    card = PlanOptions.model_validate({"device": "3090", "device_memory": memory, "host_memory": "9GB"})
    assert forecast(workload_of(FINE_TUNING, by_words.sft, "H100", {}), describe_machine(card, 1)).fits


def test_a_plan_looks_for_adapters_where_no_setting_fits() -> None:
    """The least that all weights and that LoRA take is known; between them only LoRA fits."""
    start, alone = sft("opt-125m"), gpus(1e15, count=1)

    def least(options: SFTConfig) -> float:
        """Bytes of device memory, of which 0.9 is planned with; the last setting takes the least."""
        return forecast(workload([*choose.candidates(options, alone)][-1]), alone).peak / machine.USABLE

    whole, lora = least(start), least(sft("opt-125m", adapter="lora"))
    assert lora < 0.95 * whole
    text = plan_text("opt-125m", f"{(whole + lora) / 2:.0f}", "1GB")
    assert "no setting fits: step1_sft needs" in text
    assert "--sft.adapter lora" in text.split("a command that fits:\n")[1]


def test_a_plan_says_what_adapters_take(tmp_path: Path) -> None:
    """Of all stages the one that takes most. On a shared trunk the reward model starts from the policy's model."""
    for name, hidden_size in (("policy", 32), ("other", 256)):
        tiny.config_of("llama", hidden_size=hidden_size).save_pretrained(tmp_path / name)
    named = ["--actor-model", str(tmp_path / "policy"), "--dtype", "bf16", "--devices=1", "--device=3090"]
    words = [*named, "--reward-model", str(tmp_path / "other")]

    def most(*words: str) -> float:
        chain = train.read([*named, "--adapter", "lora", *words])
        target = describe_machine(chain, 1)
        return max(
            forecast(work(options, "RTX-3090"), target).peak for options, work in planning.workloads(chain).values()
        )

    adapters, trunk = most(*words[len(named) :]), most("--share-trunk")
    assert adapters > 1.1 * trunk
    last = planning.forecast(train.read([*words, "--plan"]), 1, "train", words).splitlines()[-1]
    sizes = [
        f"{name}: {command.gigabytes(peak)} GB"
        for name, peak in (("with LoRA", adapters), ("with LoRA and a shared trunk", trunk))
    ]
    assert last == "most on a device " + "; ".join(sizes)
    for less in ("--share-trunk --adapter lora", "--actor-model demo-llama"):
        assert "with LoRA" not in planning.forecast(train.read([*words, "--plan", *less.split()]), 1, "train", words)


def test_a_plan_that_cannot_fit_names_the_cure(model_path: str) -> None:
    text = plan_text(model_path, "1KB", "9GB")
    assert "no setting fits: step1_sft needs" in text and choose.CURE in text and "a command that fits" not in text


def test_several_devices_are_started_by_the_proposed_command(model_path: str) -> None:
    for devices, deployment in (("8", " --deployment-type single_node"), ("16", " --hostfile hostfile")):
        text = plan_text(model_path, "24GB", "9GB", "--devices", devices)
        assert f"{deployment}" in text.split("a command that fits:\n")[1].split("\n")[0]


def plans_of(*words: str) -> list[Forecast]:
    """Of the three steps, on the machine that the recipe names."""
    chain = resolved(*words)
    target = describe_machine(chain, 1)
    assert chain.device is not None and target.count == chain.devices
    assert (chain.deployment_type == "single_node") == (target.count > 1)
    starts: dict[str, str] = {"actor_model": chain.actor_model, "reward_model": str(chain.reward_model)}
    return [
        forecast(workload_of(load(step), getattr(chain, section), target.device.kind, starts), target)
        for step, section in SECTIONS.items()
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.stem))
def test_a_recipe_fits_the_card_that_it_names(path: Path) -> None:
    for plan in plans_of("--config", str(path)):
        assert plan.fits, f"{plan.workload.stage}: {plan.shortfall}"


@pytest.mark.parametrize(("recipe", "model", "numbers", "reward_model"), PLANNED)
def test_a_model_takes_the_memory_of_the_table(recipe: str, model: str, numbers: str, reward_model: str) -> None:
    words = ["--config", f"{PAGE.parents[1]}/configs/recipes/{recipe}.yaml", "--actor-model", model]
    words += ["--quantize", "nf4"] if "nf4" in numbers else []
    words += ["--reward-model", reward_model] if recipe == "8x80gb" else []
    plans = plans_of(*words)
    assert all(plan.fits and plan.machine.memory <= CARDS[recipe] for plan in plans)
    assert numbers.split(" (")[0] == ", ".join(f"{plan.peak / 1e9:.1f}" for plan in plans)
