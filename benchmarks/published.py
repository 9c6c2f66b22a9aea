"""`python -m benchmarks.published`: the formulas of `--plan` and of benchmarks.simulation beside published PPO times.

Prints two tables of docs/scaling.md. The times are those of DeepSpeed-Chat's step 3 (microsoft/DeepSpeed,
blogs/deepspeed-chat/README.md, tables 1 and 2): A100-80GB, 131,900 prompts of 256 tokens, responses of 256 tokens,
1,024 of them in a step, reward model and critic OPT-350M.
"""

from collections.abc import Iterator
from functools import partial

from benchmarks.simulation import markdown
from rlhf.config.options import EngineOptions
from rlhf.plan import scaling_table, zero
from rlhf.plan.choose import as_flags, choose
from rlhf.plan.cost import cost
from rlhf.plan.machine import NODE, describe_machine
from rlhf.plan.options import PlanOptions
from rlhf.plan.sizes import size

HOURS = {
    ("opt-6.7b", 8): 4.1,
    ("opt-13b", 8): 9.0,
    ("opt-30b", 8): 18.0,
    ("opt-66b", 8): 50.4,
    ("opt-13b", 64): 1.25,
    ("opt-30b", 64): 4.0,
    ("opt-66b", 64): 7.5,
}
"""published hours by model and devices"""
STEPS = 131_900 / scaling_table.BATCH
DEVICE, HOST_MEMORY = "A100", "120GB"
"""the maker's node of 8: about 1 TB of CPU memory"""


def planned() -> Iterator[list[str]]:
    """The cells of each row: what `--plan` says of the same work, with the setting that it chooses."""
    for (model, count), published in HOURS.items():
        machine = describe_machine(PlanOptions(device=DEVICE, devices=count, host_memory=HOST_MEMORY), count)
        options, forecast = choose(scaling_table.START, partial(scaling_table.ppo, model), machine)
        step = cost(forecast.workload, forecast.machine)
        hours, sending = (seconds * STEPS / 3600 for seconds in (step.seconds, step.exchange))
        setting = as_flags(options, scaling_table.START).replace("--zero-stage ", "ZeRO-")
        setting += "" if forecast.fits else " (does not fit)"
        yield [
            model,
            str(count),
            setting,
            *(f"{h:.3g}" for h in (published, hours, sending)),
            f"{hours / published:.2f}",
        ]


def sending_hours(model: str, count: int) -> float:
    """Hours in which a device sends weights and gradients under ZeRO-3, with one micro-batch in a step."""
    machine = describe_machine(PlanOptions(device=DEVICE, devices=count), count)
    options = EngineOptions(dtype="bf16", zero_stage=3)
    return zero.bytes_sent(size(model, "lm"), options, 2, zero.RankLayout(count)) / machine.link * STEPS / 3600


def scaled() -> Iterator[list[str]]:
    """The cells of each row: 64 devices from the published time of 8, as benchmarks.simulation scales a measured time.

    What is not sending at 8 devices is divided by 8, and the sending of 64 devices is added.
    """
    for (model, count), published in HOURS.items():
        if count == NODE or (model, NODE) not in HOURS:
            continue
        work = (HOURS[model, NODE] - sending_hours(model, NODE)) * NODE / count
        hours = work + sending_hours(model, count)
        yield [model, *(f"{h:.3g}" for h in (published, hours)), f"{hours / published - 1:+.0%}"]


def tables() -> tuple[str, str]:
    """Two Markdown tables."""
    plan = ["model", "devices", "setting", "published, h", "plan, h", "of it sending", "plan / published"]
    return markdown(plan, planned()), markdown(["model", "published, h", "simulated, h", "error"], scaled())


if __name__ == "__main__":
    print("\n\n".join(tables()))
