"""`--plan` and `--zero-stage auto` of a chain of stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf import console
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.plan.choose import AUTO, CURE, as_flags, choose, resolve_auto, shortfall_message, with_adapter
from rlhf.plan.cost import seconds_of_parts
from rlhf.plan.forecast import Forecast, Workload, forecast
from rlhf.plan.machine import Machine, describe_machine
from rlhf.plan.options import PlanOptions
from rlhf.plan.report import gigabytes, report

WorkloadOf = Callable[[Any, str, dict[str, str]], Workload]
"""`workload(options, kind of device, paths of the models that earlier stages make)` of a stage's plan.py"""
Stages = Mapping[str, tuple[Any, WorkloadOf]]
"""options and workload of each stage, by its section of options"""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage."""

    text: str
    disk: float
    """bytes"""
    proposal: Any
    """the stage's options with the fastest setting that fits; None if none fits"""


def plan_stages(stages: Stages, options: PlanOptions, processes: int, model_paths: dict[str, str]) -> list[StagePlan]:
    """The plan of every stage. `processes`: the number that the run would start on this machine."""
    target = describe_machine(options, processes)
    return [
        plan_stage(section, own_options, _checked(workload, target, model_paths), target)
        for section, (own_options, workload) in stages.items()
    ]


def plan_stage(section: str, options: Any, workload: Callable[[Any], Workload], target: Machine) -> StagePlan:
    """The forecast of a stage with its options, and the fastest setting that fits.

    LoRA trains other weights, so it is proposed only if nothing else fits; it is mentioned if it avoids offloading.
    """
    chosen, best = choose(options, workload, target)
    forecasts = best if options.zero_stage == AUTO else forecast(workload(options), target)
    lines = [report(forecasts)]
    proposal = chosen if best.fits else None
    if best.fits:
        lines.append(f"  fastest setting that fits: {_setting(chosen, options, section, best)}")
    if options.adapter is None and (best.offloads or not best.fits):
        adapted, best = choose(with_adapter(options), workload, target)
        if best.fits:
            faster = "with LoRA, which trains fewer weights" if proposal is not None else "fits with LoRA only"
            lines.append(f"  {faster}: {_setting(adapted, options, section, best)}")
            proposal = proposal or adapted
    if proposal is None:
        lines.append(f"  no setting fits: {shortfall_message(best)} with the least demanding one; {CURE}")
    return StagePlan("\n".join(lines), forecasts.disk, proposal)


def _setting(chosen: Any, options: Any, section: str, plan: Forecast) -> str:
    flags = as_flags(chosen, options, f"{section}.") or "as it is"
    return f"{flags} (about {sum(seconds_of_parts(plan.workload, plan.machine).values()):.2g} s)"


def format_plans(plans: Sequence[StagePlan]) -> str:
    """The plans of the stages as text."""
    disk = sum(plan.disk for plan in plans)
    return "\n\n".join([*(plan.text for plan in plans), f"disk for all stages: {gigabytes(disk)} GB"])


def resolve_zero_stage(
    options: Any, workload: WorkloadOf, plan: PlanOptions, processes: int, model_paths: dict[str, str]
) -> tuple[Any, str]:
    """(a stage's options with `--zero-stage auto` replaced by the fastest setting that fits, a line that names it).

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
