"""The tables of docs/scaling.md: OPT from 1.3 to 175 billion weights on 1 to 1024 devices of 80 GB."""

from collections.abc import Callable, Iterator
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


LENGTH = PROMPT + RESPONSE
NeedsOf = Callable[[str, EngineOptions], Needs]
"""of a model held so"""


def fine_tuning(model: str, options: EngineOptions) -> Needs:
    """Fine-tuning as the table has it."""
    policy, passes = Player("policy", model, "lm", options), Passes(MICRO, LENGTH, LENGTH - 1)
    return Needs("fine-tuning", (policy,), torch.bfloat16, BATCH, MICRO, passes, keep=2)


def ppo(model: str, options: EngineOptions) -> Needs:
    """PPO with a small reward model and critic, as the table has it."""
    beside = FrozenOptions().beside(options)
    players = (
        Player("actor", model, "lm", options),
        Player("reference", model, "lm", beside),
        Player("critic", SCALAR, "scalar", options),
        Player("reward model", SCALAR, "scalar", beside, asked_at_once=AT_ONCE),
    )
    passes = Passes(MICRO, LENGTH, RESPONSE, entropy=True)
    rollout = Rollout(AT_ONCE, PROMPT, RESPONSE, epochs=1, minibatches=1)
    return Needs("PPO", players, torch.bfloat16, BATCH, MICRO, passes, 2, rollout)


def table(needs: NeedsOf) -> str:
    """Markdown: for each model and number of devices what fits, what it holds, and what takes the time."""
    return "\n".join(["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *_rows(needs)])


def _rows(needs: NeedsOf) -> Iterator[str]:
    for model in MODELS:
        for count in COUNTS:
            where = devices(count)
            held, plan = choose(EngineOptions(dtype="bf16"), partial(needs, model), where)
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
    return f"Fine-tuning:\n\n{table(fine_tuning)}\n\nPPO:\n\n{table(ppo)}"
