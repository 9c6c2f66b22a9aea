"""The tables of docs/scaling.md: OPT from 1.3 to 175 billion weights on 1 to 1024 devices of 80 GB."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.plan.activations import PassShape
from rlhf.plan.choose import as_flags, choose
from rlhf.plan.cost import Cost, cost
from rlhf.plan.forecast import Forecast, ModelSpec, RolloutWork, Workload
from rlhf.plan.machine import Machine, describe_machine
from rlhf.plan.options import PlanOptions
from rlhf.plan.report import gigabytes

MODELS = ("opt-1.3b", "opt-13b", "opt-66b", "opt-175b")
SCALAR = "opt-350m"
"""the reward model and the critic"""
DEVICE_COUNTS = (1, 4, 8, 16, 64, 256, 1024)
HOST_MEMORY = "250GB"
BATCH, MICRO, PROMPT, RESPONSE = 1024, 4, 256, 256
ROLLOUT_ROWS = 16
COLUMNS = (
    *("model", "devices", "setting", "GB on a device", "when", "GB of CPU memory"),
    *("GB sent", "s of work", "s of sending", "most time"),
)


START = EngineOptions(dtype="bf16", zero_stage="auto")
LENGTH = PROMPT + RESPONSE
WorkloadOf = Callable[[str, EngineOptions], Workload]
"""a workload by model and engine options"""


def fine_tuning(model: str, options: EngineOptions) -> Workload:
    """The workload of fine-tuning in the table."""
    policy, shape = ModelSpec("policy", model, "lm", options), PassShape(MICRO, LENGTH, LENGTH - 1)
    return Workload("fine-tuning", (policy,), torch.bfloat16, BATCH, MICRO, shape, keep=2)


def ppo(model: str, options: EngineOptions) -> Workload:
    """The workload of PPO in the table, with a small reward model and critic."""
    frozen = FrozenOptions().beside(options)
    models = (
        ModelSpec("actor", model, "lm", options),
        ModelSpec("reference", model, "lm", frozen),
        ModelSpec("critic", SCALAR, "scalar", options),
        ModelSpec("reward model", SCALAR, "scalar", frozen, inference_rows=ROLLOUT_ROWS),
    )
    shape = PassShape(MICRO, LENGTH, RESPONSE, entropy="watched")
    rollout = RolloutWork(ROLLOUT_ROWS, PROMPT, RESPONSE, epochs=1, minibatches=1)
    return Workload("PPO", models, torch.bfloat16, BATCH, MICRO, shape, 2, rollout)


def table(workload: WorkloadOf) -> str:
    """A Markdown table: for each model and number of devices the setting that fits, its memory and its times."""
    return "\n".join(["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *_rows(workload)])


def _rows(workload: WorkloadOf) -> Iterator[str]:
    for model in MODELS:
        for count in DEVICE_COUNTS:
            options, plan = choose(START, partial(workload, model), devices(count))
            yield "| " + " | ".join([model, str(count), *_cells(options, plan)]) + " |"


def devices(count: int) -> Machine:
    """A cluster of `count` H100 GPUs."""
    return describe_machine(
        PlanOptions(device="H100", devices=count, device_memory="80GB", host_memory=HOST_MEMORY), count
    )


def _cells(options: EngineOptions, plan: Forecast) -> list[str]:
    if not plan.fits:
        device, host = plan.shortfall
        missing = f"{gigabytes(device)} GB on a device" if device else f"{gigabytes(host)} GB of CPU memory"
        return [f"nothing fits: lacks {missing}", *["-"] * 7]
    step_cost = cost(plan.workload, plan.machine)
    memory = [gigabytes(plan.peak), plan.peak_moment.name, gigabytes(plan.host_peak)]
    times = [gigabytes(step_cost.sent), f"{step_cost.compute:.3g}", f"{step_cost.exchange:.3g}", slowest(step_cost)]
    return [as_flags(options, START).replace("--zero-stage ", "ZeRO-"), *memory, *times]


def slowest(step_cost: Cost) -> str:
    """The part of a step that takes the most time."""
    return max(step_cost.parts, key=lambda name: step_cost.parts[name])


def tables() -> str:
    """The tables of fine-tuning and of PPO."""
    return f"Fine-tuning:\n\n{table(fine_tuning)}\n\nPPO:\n\n{table(ppo)}"
