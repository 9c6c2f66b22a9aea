"""The first setting of a short list that fits: `--zero-stage auto`, and the command that a plan proposes."""

import shlex
from collections.abc import Callable, Iterator
from typing import TypeVar

from rlhf.config import Config, Tree
from rlhf.config.options import EngineOptions, FrozenOptions, effective_stage
from rlhf.config.parser import changed, leaves
from rlhf.engine.optimizers import require_whole
from rlhf.engine.precision import with_dtype
from rlhf.plan.forecast import Forecast, Workload, forecast, resident_bytes
from rlhf.plan.machine import Machine

C = TypeVar("C", bound=EngineOptions)

OFFLOAD = {"zero_stage": 3, "offload_optimizer": True}
SHARDINGS: tuple[tuple[Tree, ...], ...] = (
    tuple({"zero_stage": number} for number in (0, 1, 2, 3)),
    ({"zero_stage": 2, "offload_optimizer": True}, OFFLOAD, OFFLOAD | {"offload_param": True}),
    (
        {"zero_stage": 3, "gather_whole": False},
        OFFLOAD | {"gather_whole": False},
        OFFLOAD | {"offload_param": True, "gather_whole": False},
    ),
)
"""What ZeRO shards; what lies in CPU memory; and what no device holds as a whole at any time. Each group is slower than
the one before it, with any number of rows."""
SWITCHED = {"offload_optimizer": True, "offload_param": True, "gather_whole": False}
"""the options of SHARDINGS, as a user may have set them"""
ROWS = ("micro_batch_size", "rollout_batch_size", "eval_batch_size")
"""options that are halved together, each as long as it is above 1"""
CURE = "use more devices, a smaller --max-length, --adapter lora, or a smaller model"


def candidates(options: C, machine: Machine) -> Iterator[C]:
    """The settings to try, in this order. They change memory and speed, but no result. What the user has switched on
    stays on."""
    frozen = {name: value for name, value in options if isinstance(value, FrozenOptions)}
    if machine.on_cpu or options.share_trunk or options.quantize != "none":
        frozen = {}
    offloaded = {name: value.model_copy(update={"offload": True}) for name, value in frozen.items()}
    for number, group in enumerate(SHARDINGS):
        shardings = _possible(group, options, machine)
        for rows in _fewer_rows(options):
            for sharding in shardings:
                yield options.model_copy(update={**sharding, **rows, **(offloaded if number else {})})


def _possible(group: tuple[Tree, ...], options: EngineOptions, machine: Machine) -> list[Tree]:
    """The entries of a group that are possible and differ: offloading beside a GPU, and division among several
    processes."""
    requested = {name: value for name, value in SWITCHED.items() if getattr(options, name) == value}
    most = 2 if options.share_trunk or options.quantize != "none" else 3
    least = 3 if most == 3 and requested.keys() & {"offload_param", "gather_whole"} else 0
    settings = list[Tree]()
    for entry in group:
        stage, offloads, setting = entry["zero_stage"], "offload_optimizer" in entry, entry | requested
        alone = machine.count == 1 and not offloads and stage != max(1, least)
        if least <= stage <= most and not (machine.on_cpu and offloads) and not alone and setting not in settings:
            settings.append(setting)
    return settings


def _fewer_rows(options: EngineOptions) -> Iterator[Tree]:
    """The rows at once as they are, then with gradient checkpointing, then halved until each number is 1."""
    if not options.gradient_checkpointing:
        yield {}
    rows = {name: value for name in ROWS if (value := getattr(options, name, None))}
    for times in range(max(rows.values()).bit_length()):
        yield {"gradient_checkpointing": True} | {name: max(1, value >> times) for name, value in rows.items()}


def choose(options: C, workload: Callable[[C], Workload], machine: Machine) -> tuple[C, Forecast]:
    """(options with the first of `candidates` that fits, else with the least demanding one; its forecast).

    Raises: UserError for an optimizer that has the whole weights that it needs in no setting.
    """
    settings = [(candidate, workload(candidate)) for candidate in candidates(options, machine)]
    settings = [each for each in settings if _is_possible(*each, machine.count)]
    if not settings:
        work = workload(options)
        require_whole(with_dtype(options, work.dtype), work.b, machine.count)
    for candidate, work in settings:
        if resident_bytes(work, machine).device <= machine.memory:
            plan = forecast(work, machine)
            if plan.fits:
                return candidate, plan
    small = [(candidate, forecast(work, machine)) for candidate, work in settings if _least_rows(candidate)]
    return min(small, key=lambda each: sum(each[1].shortfall))


def _is_possible(candidate: EngineOptions, workload: Workload, ranks: int) -> bool:
    """Whether a setting runs under the ZeRO stage that it names, or one process has whole weights anyway, and its
    optimizer, if it is not AdamW, has the whole weights that it needs."""
    stage = effective_stage(with_dtype(candidate, workload.dtype), workload.b, ranks)
    return (candidate.zero_stage != 0 or stage == 0) and (candidate.optim == "adamw" or stage == 0)


def _least_rows(candidate: EngineOptions) -> bool:
    """Whether a pass of this setting needs the least memory."""
    return candidate.gradient_checkpointing and all((getattr(candidate, name, 1) or 1) == 1 for name in ROWS)


def as_flags(options: Config, start: Config, prefix: str = "") -> str:
    """What differs from `start`, as options of the command line: `--zero-stage 3 --offload-optimizer`.

    prefix: `ppo.`, for options of one stage in a chain
    """
    return shlex.join(
        word for name, value in leaves(changed(options, start)) for word in _words(f"{prefix}{name}", value)
    )


def _words(name: str, value: object) -> list[str]:
    above, dot, option = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{above}{dot}{'' if value else 'no-'}{option}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{above}{dot}{option}", *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]


def shortfall_message(plan: Forecast) -> str:
    """For a plan that does not fit: how much memory is missing."""
    device, host = plan.shortfall
    shortfalls = []
    if device:
        shortfalls.append(
            f"{device / 1e9:.1f} GB more on each of {plan.machine.count} devices ({plan.peak_moment.name})"
        )
    if host:
        shortfalls.append(f"{host / 1e9:.1f} GB more CPU memory for each device")
    return f"{plan.workload.stage} needs {' and '.join(shortfalls)}"
