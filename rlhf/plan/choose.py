"""The fastest setting of a stage whose memory suffices: `--zero-stage auto`, and the command that a plan proposes."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, TypeVar

from rlhf.config.options import EngineOptions, FrozenOptions, effective_stage
from rlhf.config.parser import changed
from rlhf.engine.optimizers import require_whole
from rlhf.engine.precision import with_dtype
from rlhf.errors import UserError
from rlhf.plan.cost import seconds_of_parts
from rlhf.plan.forecast import Forecast, Workload, forecast, resident_bytes
from rlhf.plan.machine import Machine

C = TypeVar("C", bound=EngineOptions)

AUTO = "auto"
OFFLOAD = {"zero_stage": 3, "offload_optimizer": True}
SHARDING: tuple[dict[str, Any], ...] = (
    *({"zero_stage": number} for number in (0, 1, 2, 3)),
    *({"zero_stage": number, "offload_optimizer": True} for number in (1, 2)),
    OFFLOAD,
    OFFLOAD | {"offload_param": True},
    {"zero_stage": 3, "gather_whole": False},
    OFFLOAD | {"gather_whole": False},
    OFFLOAD | {"offload_param": True, "gather_whole": False},
)
"""What ZeRO shards, and what lies in CPU memory. Without gather_whole no device holds all weights at any time."""
FLAGS = ("offload_optimizer", "offload_param", "gradient_checkpointing")
ROWS = ("micro_batch_size", "rollout_batch_size")
"""options that are halved as long as they are above 1; --eval-batch-size is halved with the micro-batch size"""
ADAPTER = "lora,r=16,lora_alpha=32"
CURE = "use more devices, a smaller --max-length, --adapter lora, or a smaller model"
FASTER_LEARNING = 10
"""factor of the learning rates with an adapter, as in configs/overlays/lora.yaml"""


def candidates(options: C, machine: Machine) -> Iterator[C]:
    """All settings that change memory and speed, but no result. What the user has switched on stays on."""
    rows = [_halvings(options, name) for name in ROWS if name in type(options).model_fields]
    frozen = [name for name in type(options).model_fields if isinstance(getattr(options, name), FrozenOptions)]
    offloaded = {name: getattr(options, name).model_copy(update={"offload": True}) for name in frozen}
    checkpointing = [{"gradient_checkpointing": flag} for flag in (False, True)]
    requested = {name: True for name in FLAGS if getattr(options, name)}
    requested |= {} if options.gather_whole else {"gather_whole": False}
    changes: list[list[dict[str, Any]]] = [_sharding(machine), checkpointing, *rows]
    changes += [[{}, offloaded]] if frozen and not (machine.on_cpu or options.share_trunk) else []
    unique: dict[str, C] = {}
    for combination in product(*changes):
        update: dict[str, Any] = {}
        for change in combination:
            update |= change
        candidate = options.model_copy(update=update | requested)
        whole_only = candidate.share_trunk or candidate.quantize != "none"
        offloads = candidate.quantize != "none" and update.keys() & offloaded.keys()
        if offloads or (whole_only and candidate.zero_stage == 3):
            continue
        if candidate.zero_stage == 3 or not (candidate.offload_param or not candidate.gather_whole):
            unique.setdefault(candidate.model_dump_json(), candidate)
    yield from unique.values()


def _sharding(machine: Machine) -> list[dict[str, Any]]:
    """The entries of SHARDING that differ: offloading beside a GPU, and division among several processes."""
    alone = machine.count == 1
    return [
        setting
        for setting in SHARDING
        if not (machine.on_cpu and "offload_optimizer" in setting)
        and not (alone and setting["zero_stage"] != 1 and "offload_optimizer" not in setting)
    ]


def _halvings(options: EngineOptions, name: str) -> list[dict[str, Any]]:
    value = getattr(options, name)
    halves: list[dict[str, Any]] = [{name: value >> times} for times in range(value.bit_length())]
    if name == "micro_batch_size" and getattr(options, "eval_batch_size", None):
        rows = options.eval_batch_size  # type: ignore[attr-defined]  # of options with an optimizer
        for times, half in enumerate(halves[1:], 1):
            half["eval_batch_size"] = max(1, rows >> times)
        if halves[-1].get("eval_batch_size", rows) > 1:
            halves.append({name: 1, "eval_batch_size": 1})
    return halves


def choose(options: C, workload: Callable[[C], Workload], machine: Machine) -> tuple[C, Forecast]:
    """(options with the fastest setting that fits, else with the least demanding one; its forecast).

    Of settings that take the same time, the first in the order of SHARDING, then with the most rows.
    """
    settings = [(candidate, workload(candidate)) for candidate in candidates(options, machine)]
    settings = [each for each in settings if not _runs_as_stage_1(*each) and _has_whole_weights(*each, machine.count)]
    if not settings:
        work = workload(options)
        require_whole(with_dtype(options, work.dtype), work.b, machine.count)
    settings.sort(key=lambda each: sum(seconds_of_parts(each[1], machine).values()))
    for candidate, work in settings:
        if resident_bytes(work, machine).device <= machine.memory:
            plan = forecast(work, machine)
            if plan.fits:
                return candidate, plan
    small = [(candidate, forecast(work, machine)) for candidate, work in settings if _least_rows(candidate)]
    return min(small, key=lambda each: sum(each[1].shortfall))


def _runs_as_stage_1(candidate: EngineOptions, workload: Workload) -> bool:
    return candidate.zero_stage == 0 and (workload.b < 4 or candidate.offload_optimizer)


def _has_whole_weights(candidate: EngineOptions, workload: Workload, ranks: int) -> bool:
    """Whether the optimizer of a setting, if it is not AdamW, has the whole weights that it needs."""
    return candidate.optim == "adamw" or effective_stage(with_dtype(candidate, workload.dtype), workload.b, ranks) == 0


def _least_rows(candidate: EngineOptions) -> bool:
    """Whether a pass of this setting needs the least memory."""
    return candidate.gradient_checkpointing and all(getattr(candidate, name, 1) == 1 for name in ROWS)


def with_adapter(options: C) -> C:
    """The options with LoRA, and with learning rates for it. This changes what is trained."""
    fields = type(options).model_fields
    rates = [name for name in fields if name.endswith("learning_rate") and fields[name].default is not None]
    return options.model_copy(
        update={"adapter": ADAPTER} | {name: float(f"{FASTER_LEARNING * getattr(options, name):g}") for name in rates}
    )


def as_flags(options: EngineOptions, start: EngineOptions, section: str = "") -> str:
    """What differs from `start`, as options of the command line: `--zero-stage 3 --offload-optimizer`.

    section: `ppo.`, for options of one stage in a chain
    """
    return shlex.join(
        word for name, value in _leaves(changed(options, start)) for word in _words(f"{section}{name}", value)
    )


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        yield from _leaves(value, f"{above}{name}.") if isinstance(value, dict) else [(above + name, value)]


def _words(name: str, value: Any) -> list[str]:
    above, dot, option = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{above}{dot}{'' if value else 'no-'}{option}"]
    return [f"--{above}{dot}{option}", f"{value:g}" if isinstance(value, float) else str(value)]


def resolve_auto(options: C, workload: Callable[[C], Workload], machine: Machine) -> tuple[C, str]:
    """(options with `--zero-stage auto` replaced, a line that names the choice). No result depends on the choice.

    Raises: UserError if no setting fits.
    """
    if options.zero_stage != AUTO:
        return options, ""
    candidate, plan = choose(options, workload, machine)
    if not plan.fits:
        raise UserError(
            f"--zero-stage auto: nothing fits; {shortfall_message(plan)} with the least demanding setting; {CURE}"
        )
    return candidate, f"{plan.workload.stage}: --zero-stage auto is {as_flags(candidate, options)}"


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
