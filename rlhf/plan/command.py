"""`--plan` and `--zero-stage auto` of a chain of stages: the forecasts as text, and the settings that fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf import console
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.plan.choose import CURE, C, as_flags, choose, shortfall_message
from rlhf.plan.devices import PlanOptions
from rlhf.plan.forecast import Forecast, ModelForecast, Workload, forecast, micro_batches
from rlhf.plan.machine import Machine, describe_machine
from rlhf.plan.zero import Bytes

AUTO = "auto"
WorkloadOf = Callable[[Any, str], Workload]
"""The workload of a stage, from its options and the kind of device."""
Stages = Mapping[str, tuple[EngineOptions, WorkloadOf]]
"""options and workload of each stage, by what its options begin with on the command line: `ppo.`"""
COLUMNS = ("weights", "gradients", "optimizer", "buffers", "activations", "KV cache", "gathered")
CELL = 14
"""width of a column; a cell may say `99.9+99.9cpu`"""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage."""

    text: str
    forecast: Forecast
    """of the options as they are"""
    least: Forecast
    """of the first setting that fits, else of the least demanding one"""
    proposal: EngineOptions | None
    """the stage's options with the first setting that fits; None if none fits"""


def plan_stages(stages: Stages, options: PlanOptions, processes: int) -> list[StagePlan]:
    """The plan of every stage. `processes`: the number that the run would start on this machine."""
    target = describe_machine(options, processes)
    return [
        plan_stage(prefix, own_options, _checked(workload, target), target)
        for prefix, (own_options, workload) in stages.items()
    ]


def plan_stage(prefix: str, options: C, workload: Callable[[C], Workload], target: Machine) -> StagePlan:
    """The forecast of a stage with its options, and the first setting that fits."""
    chosen, best = choose(options, workload, target)
    typed = best if options.zero_stage == AUTO else forecast(workload(options), target)
    text, flags = report(typed), as_flags(chosen, options, prefix)
    if not best.fits:
        text += f"\n  no setting fits: {shortfall_message(best)} with the least demanding one; {CURE}"
    elif flags:
        text += f"\n  first setting that fits: {flags}"
    return StagePlan(text, typed, best, chosen if best.fits else None)


def format_plans(plans: Sequence[StagePlan]) -> str:
    """The plans of the stages as text, and what holds for all."""
    disk = sum(plan.forecast.disk for plan in plans)
    lines = [f"disk for all stages: {gigabytes(disk)} GB", "time: not predicted; a run prints what is left of a stage"]
    if plans[0].forecast.machine.on_cpu:
        lines.append("on a CPU: glibc keeps freed blocks, up to a third more; MALLOC_MMAP_THRESHOLD_=131072 frees them")
    return "\n\n".join([*(plan.text for plan in plans), "\n".join(lines)])


def most(plans: Sequence[StagePlan]) -> str:
    """The most that a stage takes on a device, with the first setting that fits."""
    return f"{gigabytes(max(plan.least.peak for plan in plans))} GB"


def resolve_zero_stage(options: C, workload: WorkloadOf, plan_options: PlanOptions, processes: int) -> C:
    """The options of a stage with the first setting that fits in place of `--zero-stage auto`; a line names it. No
    result depends on the choice.

    Raises: UserError if no setting fits.
    """
    target = describe_machine(plan_options, processes)
    chosen, plan = choose(options, _checked(workload, target), target)
    if not plan.fits:
        raise UserError(
            f"--zero-stage auto: nothing fits; {shortfall_message(plan)} with the least demanding setting; {CURE}"
        )
    console.say(f"{plan.workload.stage}: --zero-stage auto is {as_flags(chosen, options)}")
    return chosen


def _checked(workload: WorkloadOf, target: Machine) -> Callable[[EngineOptions], Workload]:
    """The workload on this machine. It raises a UserError for what a plan cannot count."""

    def stage_workload(options: EngineOptions) -> Workload:
        for name in ("tensor_parallel_size", "sequence_parallel_size"):
            if getattr(options, name) > 1:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(options, name)}: --plan and --zero-stage auto cannot count "
                    "models or rows that are split over devices; choose a stage with --zero-stage 0, 1, 2 or 3"
                )
        return workload(options, target.device.kind)

    return stage_workload


def gigabytes(value: float) -> str:
    """Bytes as decimal gigabytes with three digits."""
    digits = 2 if value < 9.995e9 else 1 if value < 99.95e9 else 0
    return "<0.01" if 0 < value < 0.005e9 else f"{value / 1e9:.{digits}f}"


def report(plan: Forecast) -> str:
    """A stage as text: one line for each model, the most memory in each phase, whether it fits, and disk."""
    workload, machine, on_cpu = plan.workload, plan.machine, plan.machine.on_cpu
    count, dtype = machine.count, str(workload.dtype).removeprefix("torch.")
    what = f"{count} process{'es' * (count > 1)} on the CPU" if on_cpu else f"{count} x {machine.device.kind}"
    rows = f"{workload.micro_batch} x {workload.shape.tokens} tokens"
    phases = ", ".join(f"{phase} {gigabytes(peak)}" for phase, peak in plan.phase_peaks.items())
    micros = micro_batches(workload, count)
    wide = max(30, *(len(_model_label(model)) for model in plan.models))
    lines = [
        f"{workload.stage} on {what}, {dtype}, {micros} micro-batch{'es' * (micros > 1)} of {rows} a step",
        f"  {'GB on each ' + ('process' if on_cpu else 'device'):{wide}}"
        + "".join(f"{name:>{CELL}}" for name in COLUMNS),
        *(f"  {_model_label(model):{wide}}" + "".join(map(_cell, _memory_columns(model))) for model in plan.models),
        f"  most at once, of {gigabytes(machine.memory)} GB: {phases} (the most: {plan.peak_moment.name})",
    ]
    if not on_cpu:
        assumed = " (assumed; --host-memory says it)" if machine.assumed_host else ""
        host = f"{gigabytes(plan.host_peak)} GB of {gigabytes(machine.host)}"
        lines.append(f"  most CPU memory: {host} for each device{assumed}")
    lines += [
        "  fits" if plan.fits else f"  does not fit: {shortfall_message(plan)}",
        f"  disk: {gigabytes(plan.disk)} GB for {workload.keep} checkpoints, one being written, and the models",
        *([f"  {workload.note}"] * bool(workload.note)),
    ]
    return "\n".join(lines)


def _model_label(model: ModelForecast) -> str:
    role, options = model.role, model.role.options
    setting = f"ZeRO-{options.zero_stage}" if role.trained else "frozen" + " ZeRO-3" * (options.zero_stage == 3)
    weights = f"{model.size.total / 1e6:,.1f}M"
    if role.on_trunk:
        setting += ", on the trunk"
    elif role.adapter is not None:
        weights = f"{model.size.trained / 1e6:.1f}M of {weights}"
    return f"{role.part.name} ({setting}, {weights})"


def _memory_columns(model: ModelForecast) -> tuple[Bytes, ...]:
    memory, peaks = model.memory, model.activations
    activations = Bytes(max(peaks.head, peaks.embeddings) if model.role.trained else peaks.inference)
    buffers = memory.buffers + memory.passing
    return memory.weights, memory.gradients, memory.optimizer, buffers, activations, Bytes(model.cache), memory.gathered


def _cell(value: Bytes) -> str:
    """Gigabytes on the device; those in CPU memory follow a plus sign."""
    parts = [gigabytes(value.device)] * bool(value.device) + [f"+{gigabytes(value.host)}cpu"] * bool(value.host)
    return f"{''.join(parts) or '-':>{CELL}}"
