"""`--zero-stage auto`: the first setting, in order of speed, whose memory suffices."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.plan.machine import Machine
from rlhf.plan.stage import Forecast, Needs, forecast

C = TypeVar("C", bound=EngineOptions)

AUTO = "auto"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True, "offload_param": True, "gradient_checkpointing": True},
)
"""Each needs less memory on the device than the one before, and more time."""
LADDER = (*SETTINGS, *({**setting, "gather_whole": False} for setting in SETTINGS[3:]))
"""Last those for a model of which no device can hold all weights even once, to generate."""
FLAGS = ("offload_optimizer", "offload_param", "gradient_checkpointing")


def tried(options: C, needs: Callable[[C], Needs], machine: Machine) -> Iterator[tuple[C, Forecast]]:
    """Every setting in order, and what it takes. What the options ask for stays: nothing offloaded comes back."""
    asked: dict[str, Any] = {name: True for name in FLAGS if getattr(options, name)}
    asked |= {} if options.gather_whole else {"gather_whole": False}
    for setting in LADDER:
        held = options.model_copy(update=setting | asked)
        needed = needs(held)
        stage = held.zero_stage
        idle = stage == 0 and (needed.b < 4 or held.offload_optimizer)  # it would be stage 1
        if not idle and not (stage != 3 and held.offload_param):
            yield held, forecast(needed, machine)


def choose(options: C, needs: Callable[[C], Needs], machine: Machine) -> tuple[C, Forecast]:
    """The options with the first setting that fits, else with the one that lacks least; and what it takes."""
    found = None
    for held, plan in tried(options, needs, machine):
        if plan.fits:
            return held, plan
        if found is None or sum(plan.lacking) < sum(found[1].lacking):
            found = held, plan
    assert found is not None
    return found


def said(options: EngineOptions) -> str:
    """A setting as options of the command line: `--zero-stage 3 --offload-optimizer`."""
    flags = ["--" + name.replace("_", "-") for name in FLAGS if getattr(options, name)]
    flags += [] if options.gather_whole else ["--no-gather-whole"]
    return " ".join([f"--zero-stage {options.zero_stage}", *flags])


def settled(options: C, needs: Callable[[C], Needs], machine: Machine) -> tuple[C, str]:
    """The options with `auto` replaced, and a line that says by what; others as they are.

    Raises: UserError if no setting fits.
    """
    if options.zero_stage != AUTO:
        return options, ""
    held, plan = choose(options, needs, machine)
    if not plan.fits:
        raise UserError(f"--zero-stage auto: nothing fits; {missing(plan)}")
    return held, f"{plan.needs.stage}: --zero-stage auto is {said(held)}"


def missing(plan: Forecast) -> str:
    """What a plan that does not fit lacks, and what would mend it."""
    device, host = plan.lacking
    parts = []
    if device:
        parts.append(f"{device / 1e9:.1f} GB more on each of {plan.machine.count} devices ({plan.device.name})")
    if host:
        parts.append(f"{host / 1e9:.1f} GB more CPU memory for each device")
    smaller = "--micro-batch-size, --max-length" + (" or --rollout-batch-size" if plan.needs.rollout else "")
    cure = f"use more devices, smaller {smaller}, an adapter, or a smaller model"
    return f"{plan.needs.stage} needs {' and '.join(parts)} with the least demanding setting: {cure}"
