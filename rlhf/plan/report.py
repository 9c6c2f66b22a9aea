"""A plan as text."""

from collections.abc import Iterator

from rlhf.config.options import EngineOptions
from rlhf.plan.choose import missing
from rlhf.plan.cost import cost
from rlhf.plan.stage import Forecast, Line, micro_batches
from rlhf.plan.zero import Bytes

COLUMNS = ("weights", "gradients", "optimizer", "buffers", "activations", "KV cache", "gathered")


def gigabytes(value: float) -> str:
    """Decimal, three digits."""
    return (
        f"{value / 1e9:.2f}" if value < 9.995e9 else f"{value / 1e9:.1f}" if value < 99.95e9 else f"{value / 1e9:.0f}"
    )


def report(plan: Forecast) -> str:
    """A stage: a line for each model, the moment with the most memory, whether it fits, time and disk."""
    return "\n".join(_lines(plan))


def _lines(plan: Forecast) -> Iterator[str]:
    needs, machine = plan.needs, plan.machine
    count, kind = machine.count, machine.device.kind
    what = f"{count} process{'es' * (count > 1)} on the CPU" if machine.on_cpu else f"{count} x {kind}"
    dtype = str(needs.dtype).removeprefix("torch.")
    yield f"{needs.stage} on {what}, {dtype}, {micro_batches(needs, count)} micro-batches of {_rows(plan)} a step"
    yield f"  {'GB on each device':30}" + "".join(f"{name:>12}" for name in COLUMNS)
    for line in plan.lines:
        yield f"  {_who(line):30}" + "".join(f"{_cell(value):>12}" for value in _values(line))
    place = "process" if machine.on_cpu else "device"
    yield f"  most on a {place}: {gigabytes(plan.peak)} GB of {gigabytes(machine.memory)} ({plan.device.name})"
    if not machine.on_cpu:
        yield f"  most CPU memory: {gigabytes(plan.host)} GB of {gigabytes(machine.host)} for each device"
    if machine.on_cpu:
        yield "  glibc keeps freed blocks, up to a third more; MALLOC_MMAP_THRESHOLD_=131072 gives them back"
    yield "  fits" if plan.fits else f"  does not fit: {missing(plan)}"
    yield from _costs(plan)
    if needs.note:
        yield f"  {needs.note}"


def _who(line: Line) -> str:
    held = line.player.held
    how = (
        f"ZeRO-{held.zero_stage}" if isinstance(held, EngineOptions) else "frozen" + " ZeRO-3" * (held.zero_stage == 3)
    )
    if line.player.adapter is not None:
        how += f", {line.size.trained / 1e6:.1f}M of"
    return f"{line.player.role} ({how}, {line.size.total / 1e6:,.1f}M)"


def _rows(plan: Forecast) -> str:
    passes = plan.needs.passes
    return f"{plan.needs.micro_batch} x {passes.tokens} tokens"


def _values(line: Line) -> tuple[Bytes, ...]:
    held, active = line.held, line.active
    activations = Bytes(active.training if line.player.trained else active.inference)
    buffers = held.buffers + held.passing
    return held.weights, held.gradients, held.optimizer, buffers, activations, Bytes(line.cache), held.gathered


def _cell(value: Bytes) -> str:
    """Of the device, and what lies in CPU memory after a plus."""
    if not value.total:
        return "-"
    parts = [gigabytes(value.device)] if value.device else []
    return "".join([*parts, *([f"+{gigabytes(value.host)}cpu"] if value.host else [])])


def _costs(plan: Forecast) -> Iterator[str]:
    found, machine = cost(plan), plan.machine
    rate = machine.flops(plan.needs.b) / machine.utilisation / 1e12
    parts = {"generate": found.generate, "score": found.score, "train": found.train, "exchange": found.exchange}
    shown = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in parts.items() if seconds)
    what = "iteration" if plan.needs.rollout else "optimizer step"
    yield (
        f"  {what}: about {found.seconds:.2g} s ({shown}) at {machine.utilisation:.0%} of {rate:g} TFLOP/s, "
        f"{machine.device.bandwidth / 1e9:g} GB/s of memory and {machine.link / 1e9:g} GB/s between devices"
    )
    yield f"  disk: {gigabytes(plan.disk)} GB for {plan.needs.keep} checkpoints, one being written, and the models"
