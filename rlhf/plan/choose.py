"""`--zero-stage auto`: the first setting, in order of speed, whose memory suffices."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.plan.forecast import Forecast, Workload, forecast
from rlhf.plan.machine import Machine

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
"""Each setting needs less memory on the device than the one before it, and more time."""
CANDIDATES = (*SETTINGS, *({**setting, "gather_whole": False} for setting in SETTINGS[3:]))
"""The last ones are for a model whose weights do not fit on one device even for generation."""
FLAGS = ("offload_optimizer", "offload_param", "gradient_checkpointing")


def candidates(options: C, workload: Callable[[C], Workload], machine: Machine) -> Iterator[tuple[C, Forecast]]:
    """Every setting in order, with its forecast. Offloading and checkpointing that the user requested stay on."""
    requested: dict[str, Any] = {name: True for name in FLAGS if getattr(options, name)}
    requested |= {} if options.gather_whole else {"gather_whole": False}
    for setting in CANDIDATES:
        candidate = options.model_copy(update=setting | requested)
        stage_workload = workload(candidate)
        stage = candidate.zero_stage
        same_as_stage_1 = stage == 0 and (stage_workload.b < 4 or candidate.offload_optimizer)
        if not same_as_stage_1 and not (stage != 3 and candidate.offload_param):
            yield candidate, forecast(stage_workload, machine)


def choose(options: C, workload: Callable[[C], Workload], machine: Machine) -> tuple[C, Forecast]:
    """(options with the first setting that fits, else with the one whose shortfall is smallest; its forecast)."""
    best = None
    for candidate, plan in candidates(options, workload, machine):
        if plan.fits:
            return candidate, plan
        if best is None or sum(plan.shortfall) < sum(best[1].shortfall):
            best = candidate, plan
    assert best is not None
    return best


def as_flags(options: EngineOptions) -> str:
    """A setting as options of the command line: `--zero-stage 3 --offload-optimizer`."""
    flags = ["--" + name.replace("_", "-") for name in FLAGS if getattr(options, name)]
    flags += [] if options.gather_whole else ["--no-gather-whole"]
    return " ".join([f"--zero-stage {options.zero_stage}", *flags])


def resolve_auto(options: C, workload: Callable[[C], Workload], machine: Machine) -> tuple[C, str]:
    """(options with `--zero-stage auto` replaced, a line that names the choice); other options are unchanged.

    Raises: UserError if no setting fits.
    """
    if options.zero_stage != AUTO:
        return options, ""
    candidate, plan = choose(options, workload, machine)
    if not plan.fits:
        raise UserError(f"--zero-stage auto: nothing fits; {shortfall_message(plan)}")
    return candidate, f"{plan.workload.stage}: --zero-stage auto is {as_flags(candidate)}"


def shortfall_message(plan: Forecast) -> str:
    """For a plan that does not fit: how much memory is missing, and the cure."""
    device, host = plan.shortfall
    shortfalls = []
    if device:
        shortfalls.append(
            f"{device / 1e9:.1f} GB more on each of {plan.machine.count} devices ({plan.peak_moment.name})"
        )
    if host:
        shortfalls.append(f"{host / 1e9:.1f} GB more CPU memory for each device")
    smaller = "--micro-batch-size, --max-length" + (" or --rollout-batch-size" if plan.workload.rollout else "")
    cure = f"use more devices, smaller {smaller}, an adapter, or a smaller model"
    return f"{plan.workload.stage} needs {' and '.join(shortfalls)} with the least demanding setting: {cure}"
