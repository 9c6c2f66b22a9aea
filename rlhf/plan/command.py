"""`--plan` and `--zero-stage auto` of a chain of stages."""

from collections.abc import Callable, Mapping
from typing import Any

from rlhf import console
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.plan.choose import AUTO, choose, said, settled
from rlhf.plan.machine import Machine, machine
from rlhf.plan.options import PlanOptions
from rlhf.plan.report import gigabytes, report
from rlhf.plan.stage import Needs, forecast

NeedsOf = Callable[[Any, str, dict[str, str]], Needs]
"""`needs(options, kind of device, places of models that earlier stages make)` of a stage's plan.py"""
Stages = Mapping[str, tuple[Any, NeedsOf]]


def show(stages: Stages, options: PlanOptions, processes: int, starts: dict[str, str]) -> str:
    """The plan of every stage, as text. `processes`: those that the run would start here."""
    where = machine(options, processes)
    parts, disk = [], 0.0
    for stage_options, needs in stages.values():
        asked = _bound(needs, where, starts)
        if stage_options.zero_stage == AUTO:
            held, plan = choose(stage_options, asked, where)
            parts.append(f"{report(plan)}\n  --zero-stage auto: {said(held)}")
        else:
            plan = forecast(asked(stage_options), where)
            parts.append(report(plan))
        disk += plan.disk
    return "\n\n".join([*parts, f"disk for all stages: {gigabytes(disk)} GB"])


def settle(options: Any, needs: NeedsOf, plan: PlanOptions, processes: int, starts: dict[str, str]) -> tuple[Any, str]:
    """A stage's options with `--zero-stage auto` replaced by what fits, and a line that says so.

    Raises: UserError if nothing fits.
    """
    if options.zero_stage != AUTO:
        return options, ""
    where = machine(plan, processes)
    return settled(options, _bound(needs, where, starts), where)


def settle_alone(options: Any, needs: NeedsOf, starts: Mapping[str, str] | None = None) -> Any:
    """The same for a stage that was started without a chain; says what it chose."""
    held, line = settle(options, needs, PlanOptions(), collectives.world_size(), dict(starts or {}))
    if line:
        console.say(line)
    return held


def _bound(needs: NeedsOf, where: Machine, starts: dict[str, str]) -> Callable[[Any], Needs]:
    def bound(options: Any) -> Needs:
        for name in ("tensor_parallel_size", "sequence_parallel_size"):
            if getattr(options, name) > 1:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(options, name)}: --plan and --zero-stage auto know of models "
                    "and rows that are not shared only; name a stage with --zero-stage 0, 1, 2 or 3"
                )
        try:
            return needs(options, where.device.kind, starts)
        except KeyError as missing:
            raise UserError(f"no {missing.args[0]}: name one, or run the stage before") from None

    return bound
