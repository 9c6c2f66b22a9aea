"""A forecast as text."""

from collections.abc import Iterator

from rlhf import console
from rlhf.config.options import EngineOptions
from rlhf.plan.choose import shortfall_message
from rlhf.plan.cost import seconds_of_parts
from rlhf.plan.forecast import Forecast, ModelForecast, micro_batches
from rlhf.plan.zero import Bytes

COLUMNS = ("weights", "gradients", "optimizer", "buffers", "activations", "KV cache", "gathered")


def gigabytes(value: float) -> str:
    """Bytes as decimal gigabytes with three digits."""
    return (
        f"{value / 1e9:.2f}" if value < 9.995e9 else f"{value / 1e9:.1f}" if value < 99.95e9 else f"{value / 1e9:.0f}"
    )


def report(plan: Forecast) -> str:
    """A stage as text: one line for each model, the moment with the most memory, whether it fits, time and disk."""
    return "\n".join(_report_lines(plan))


def _report_lines(plan: Forecast) -> Iterator[str]:
    workload, machine = plan.workload, plan.machine
    count, kind = machine.count, machine.device.kind
    what = f"{count} process{'es' * (count > 1)} on the CPU" if machine.on_cpu else f"{count} x {kind}"
    dtype = str(workload.dtype).removeprefix("torch.")
    batches = f"{micro_batches(workload, count)} micro-batches of {_micro_batch_label(plan)}"
    yield f"{workload.stage} on {what}, {dtype}, {batches} a step"
    yield f"  {'GB on each device':30}" + "".join(f"{name:>12}" for name in COLUMNS)
    for model in plan.models:
        yield f"  {_model_label(model):30}" + "".join(f"{_cell(value):>12}" for value in _memory_columns(model))
    peak = f"{gigabytes(plan.peak)} GB of {gigabytes(machine.memory)} ({plan.peak_moment.name})"
    yield f"  most on a {_unit(plan)}: {peak}"
    if not machine.on_cpu:
        yield f"  most CPU memory: {gigabytes(plan.host_peak)} GB of {gigabytes(machine.host)} for each device"
    if machine.on_cpu:
        yield "  glibc keeps freed blocks, up to a third more; MALLOC_MMAP_THRESHOLD_=131072 gives them back"
    yield "  fits" if plan.fits else f"  does not fit: {shortfall_message(plan)}"
    yield from _cost_lines(plan)
    if workload.note:
        yield f"  {workload.note}"


def _unit(plan: Forecast) -> str:
    return "process" if plan.machine.on_cpu else "device"


def _model_label(model: ModelForecast) -> str:
    options = model.spec.options
    trained = isinstance(options, EngineOptions)
    setting = f"ZeRO-{options.zero_stage}" if trained else "frozen" + " ZeRO-3" * (options.zero_stage == 3)
    if model.spec.on_trunk:
        setting += ", on the trunk"
    elif model.spec.adapter is not None:
        setting += f", {model.size.trained / 1e6:.1f}M of"
    return f"{model.spec.role} ({setting}, {model.size.total / 1e6:,.1f}M)"


def _micro_batch_label(plan: Forecast) -> str:
    shape = plan.workload.shape
    return f"{plan.workload.micro_batch} x {shape.tokens} tokens"


def _memory_columns(model: ModelForecast) -> tuple[Bytes, ...]:
    memory = model.memory
    activations = Bytes(model.activations.training if model.spec.trained else model.activations.inference)
    buffers = memory.buffers + memory.passing
    return memory.weights, memory.gradients, memory.optimizer, buffers, activations, Bytes(model.cache), memory.gathered


def _cell(value: Bytes) -> str:
    """Gigabytes on the device; those in CPU memory follow a plus sign."""
    if not value.total:
        return "-"
    parts = [gigabytes(value.device)] if value.device else []
    return "".join([*parts, *([f"+{gigabytes(value.host)}cpu"] if value.host else [])])


def _total_time(plan: Forecast, step_seconds: float) -> str:
    """How long the stage takes, as far as it is known before its data are read."""
    workload = plan.workload
    if workload.iterations:
        total = console.duration(workload.iterations * step_seconds)
        return f"{workload.iterations:,} iterations: about {total}, and the evaluations"
    if workload.rows:
        total = console.duration(workload.rows / workload.batch * step_seconds)
        return f"about {workload.rows:,} rows of your files, all epochs together: about {total}, and the evaluations"
    return f"1,000 rows: about {console.duration(1000 / workload.batch * step_seconds)} an epoch, and the evaluations"


def _cost_lines(plan: Forecast) -> Iterator[str]:
    parts = seconds_of_parts(plan.workload, plan.machine)
    rate, seconds = plan.machine.flops(plan.workload.b) / 1e12, sum(parts.values())
    times = ", ".join(f"{name} {part:.2g} s" for name, part in parts.items())
    what = "iteration" if plan.workload.rollout else "optimizer step"
    yield f"  {_total_time(plan, seconds)}"
    yield f"  {what}: about {seconds:.2g} s ({times}) at {rate:.3g} TFLOP/s of a {_unit(plan)}, a rough estimate"
    yield f"  disk: {gigabytes(plan.disk)} GB for {plan.workload.keep} checkpoints, one being written, and the models"
