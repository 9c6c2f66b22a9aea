"""`--plan` and `--zero-stage auto` of a chain of stages."""

from collections.abc import Callable, Mapping
from typing import Any

from rlhf import console
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.plan.choose import AUTO, as_flags, choose, resolve_auto
from rlhf.plan.forecast import Workload, forecast
from rlhf.plan.machine import Machine, describe_machine
from rlhf.plan.options import PlanOptions
from rlhf.plan.report import gigabytes, report

WorkloadOf = Callable[[Any, str, dict[str, str]], Workload]
"""`workload(options, kind of device, paths of the models that earlier stages make)` of a stage's plan.py"""
Stages = Mapping[str, tuple[Any, WorkloadOf]]


def format_plans(stages: Stages, options: PlanOptions, processes: int, model_paths: dict[str, str]) -> str:
    """The plan of every stage, as text. `processes`: the number that the run would start on this machine."""
    target = describe_machine(options, processes)
    reports, disk = [], 0.0
    for stage_options, workload in stages.values():
        checked = _checked(workload, target, model_paths)
        if stage_options.zero_stage == AUTO:
            chosen, plan = choose(stage_options, checked, target)
            reports.append(f"{report(plan)}\n  --zero-stage auto: {as_flags(chosen)}")
        else:
            plan = forecast(checked(stage_options), target)
            reports.append(report(plan))
        disk += plan.disk
    return "\n\n".join([*reports, f"disk for all stages: {gigabytes(disk)} GB"])


def resolve_zero_stage(
    options: Any, workload: WorkloadOf, plan: PlanOptions, processes: int, model_paths: dict[str, str]
) -> tuple[Any, str]:
    """(a stage's options with `--zero-stage auto` replaced by the first setting that fits, a line that names it).

    Raises: UserError if no setting fits.
    """
    if options.zero_stage != AUTO:
        return options, ""
    target = describe_machine(plan, processes)
    return resolve_auto(options, _checked(workload, target, model_paths), target)


def resolve_standalone(options: Any, workload: WorkloadOf, model_paths: Mapping[str, str] | None = None) -> Any:
    """The same for a stage that is started without a chain. Prints the choice."""
    paths = dict(model_paths or {})
    chosen, line = resolve_zero_stage(options, workload, PlanOptions(), collectives.world_size(), paths)
    if line:
        console.say(line)
    return chosen


def _checked(workload: WorkloadOf, target: Machine, model_paths: dict[str, str]) -> Callable[[Any], Workload]:
    """The stage's workload function on this machine, with its mistakes as a UserError."""

    def stage_workload(options: Any) -> Workload:
        for name in ("tensor_parallel_size", "sequence_parallel_size"):
            if getattr(options, name) > 1:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(options, name)}: --plan and --zero-stage auto cannot count "
                    "models or rows that are split over devices; choose a stage with --zero-stage 0, 1, 2 or 3"
                )
        try:
            return workload(options, target.device.kind, model_paths)
        except KeyError as missing:
            raise UserError(f"no {missing.args[0]}: name one, or run the earlier stages first") from None

    return stage_workload
