"""The tables of docs/scaling.md: OPT from 1.3 to 175 billion weights on 1 to 1024 devices of 80 GB."""

from collections.abc import Iterator
from functools import partial

import torch

from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.plan.activations import Passes
from rlhf.plan.choose import choose, said
from rlhf.plan.cost import Cost, cost
from rlhf.plan.machine import Machine, machine
from rlhf.plan.options import PlanOptions
from rlhf.plan.report import gigabytes
from rlhf.plan.stage import Forecast, Needs, Player, Rollout

MODELS = ("opt-1.3b", "opt-13b", "opt-66b", "opt-175b")
SCALAR = "opt-350m"
"""of the reward model and critic"""
COUNTS = (1, 4, 8, 16, 64, 256, 1024)
HOST = "250GB"
BATCH, MICRO, PROMPT, RESPONSE = 1024, 4, 256, 256
AT_ONCE = 16
HEAD = (
    *("model", "devices", "setting", "GB on a device", "when", "GB of CPU memory"),
    *("GB sent", "s of work", "s of sending", "most time"),
)


def needs(stage: str, model: str, options: EngineOptions) -> Needs:
    """Fine-tuning, or PPO with a small reward model and critic, as the tables have it."""
    length = PROMPT + RESPONSE
    policy = Player("policy", model, "lm", options)
    if stage == "step1_sft":
        return Needs(stage, (policy,), torch.bfloat16, BATCH, MICRO, Passes(MICRO, length, length - 1), keep=2)
    beside = FrozenOptions().beside(options)
    players = (
        Player("actor", model, "lm", options),
        Player("reference", model, "lm", beside),
        Player("critic", SCALAR, "scalar", options),
        Player("reward model", SCALAR, "scalar", beside, asked_at_once=AT_ONCE),
    )
    passes = Passes(MICRO, length, RESPONSE, entropy=True)
    rollout = Rollout(AT_ONCE, PROMPT, RESPONSE, epochs=1, minibatches=1)
    return Needs(stage, players, torch.bfloat16, BATCH, MICRO, passes, 2, rollout)


def table(stage: str) -> str:
    """Markdown: for each model and number of devices what fits, what it holds, and what takes the time."""
    return "\n".join(["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *_rows(stage)])


def _rows(stage: str) -> Iterator[str]:
    for model in MODELS:
        for count in COUNTS:
            where = devices(count)
            held, plan = choose(EngineOptions(dtype="bf16"), partial(needs, stage, model), where)
            yield "| " + " | ".join([model, str(count), *_cells(held, plan)]) + " |"


def devices(count: int) -> Machine:
    return machine(PlanOptions(device="H100", devices=count, device_memory="80GB", host_memory=HOST), count)


def _cells(held: EngineOptions, plan: Forecast) -> list[str]:
    if not plan.fits:
        device, host = plan.lacking
        place = f"{gigabytes(device)} GB on a device" if device else f"{gigabytes(host)} GB of CPU memory"
        return [f"nothing fits: lacks {place}", *["-"] * 7]
    found = cost(plan)
    memory = [gigabytes(plan.peak), plan.device.name, gigabytes(plan.host)]
    times = [gigabytes(found.sent), f"{found.compute:.3g}", f"{found.exchange:.3g}", slowest(found)]
    return [said(held).replace("--zero-stage ", "ZeRO-"), *memory, *times]


def slowest(found: Cost) -> str:
    """The part of a step that takes the most time."""
    parts = {"generate": found.generate, "score": found.score, "train": found.train, "exchange": found.exchange}
    return max(parts, key=lambda name: parts[name])


def page() -> str:
    """Both tables."""
    return f"Fine-tuning:\n\n{table('step1_sft')}\n\nPPO:\n\n{table('step3_ppo')}"
