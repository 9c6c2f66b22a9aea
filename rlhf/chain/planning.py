"""`--plan` and `--zero-stage auto` of the chain: forecasts of its stages, and the command that a plan proposes."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.chain.options import SECTIONS, prefix
from rlhf.chain.stages import STAGES, load
from rlhf.chain.steps import chosen_steps
from rlhf.config.command_line import without
from rlhf.plan.choose import as_flags
from rlhf.plan.command import AUTO, StagePlan, WorkloadOf, format_plans, plan_stages, resolve_zero_stage
from rlhf.plan.devices import PlanOptions
from rlhf.plan.machine import NODE
from rlhf.plan.sizes import local_tokenizer
from rlhf.roles import Role


def workloads(chain: Any, change: Callable[[Any], Any] = lambda options: options) -> dict[str, tuple[Any, WorkloadOf]]:
    """(options, workload) of each chosen stage, by section. Models that earlier stages have made are taken, else those
    from which these stages start.

    change: of the options of every stage
    Raises: UserError.
    """
    steps, planned = chosen_steps(chain), dict[str, Role]()
    stages: dict[str, tuple[Any, WorkloadOf]] = {}
    # What earlier steps start from represents their models; of a stage alone no such options are known.
    for step in steps if chain.ALONE else range(1, max(steps) + 1):
        stage, options = load(step), change(getattr(chain, SECTIONS[step]))
        if step not in steps:
            role = stage.named_roles(options)[0]
        else:
            table = stage.roles(options, planned, local_tokenizer)
            role, stages[SECTIONS[step]] = table[0], (options, partial(stage.workload, table))
        trained = Path(chain.output_dir) / STAGES[step].name / "model"
        planned[STAGES[step].name] = replace(role, path=str(trained)) if (trained / "config.json").is_file() else role
    return stages


def forecast(chain: Any, processes: int, program: str, argv: list[str]) -> str:
    """The text of `--plan`: memory and disk of every stage, and a command that fits. If no setting of the options fits,
    one with adapters is looked for, then one with adapters on a shared base model.

    program, argv: the command as typed
    """
    stages = workloads(chain)
    plans = _plans(stages, chain, processes)
    text = format_plans(plans)
    for trunk in (False, True):
        if all(plan.proposal is not None for plan in plans):
            break
        plans = _plans(workloads(chain, partial(_with_adapter, trunk=trunk)), chain, processes)
    named = zip(stages, plans, strict=True)
    proposals = {section: plan.proposal for section, plan in named if plan.proposal is not None}
    if len(proposals) < len(plans):
        return text
    words = [program.replace("rlhf plan", "rlhf train"), shlex.join(without(argv, PlanOptions.model_fields))]
    words += _deployment(chain, chain.devices or processes)
    words += [
        as_flags(options, getattr(chain, section), prefix(chain, section)) for section, options in proposals.items()
    ]
    return f"{text}\n\na command that fits:\n{' '.join(filter(None, words))}"


def _plans(stages: dict[str, tuple[Any, WorkloadOf]], chain: Any, processes: int) -> list[StagePlan]:
    return plan_stages({prefix(chain, section): stage for section, stage in stages.items()}, chain, processes)


def _with_adapter(options: Any, trunk: bool) -> Any:
    """The options with LoRA, if they name no adapter. trunk: whether all models share their base"""
    update = {"adapter": options.adapter or "lora", "share_trunk": trunk or options.share_trunk}
    return options.model_copy(update=update)


def _deployment(chain: Any, devices: int) -> list[str]:
    """The options that start as many processes, if the command line does not yet."""
    if chain.deployment_type not in ("auto", "single_gpu") or devices == 1:
        return []
    return ["--deployment-type single_node" if devices <= NODE else "--deployment-type multi_node --hostfile hostfile"]


def resolve_zero_stages(chain: Any, processes: int) -> Any:
    """Replace `--zero-stage auto` by the first setting that fits, and print it. Raises: UserError if none fits."""
    if all(getattr(chain, SECTIONS[step]).zero_stage != AUTO for step in chosen_steps(chain)):
        return chain
    resolved = {
        section: resolve_zero_stage(options, workload, chain, processes)
        for section, (options, workload) in workloads(chain).items()
        if options.zero_stage == AUTO
    }
    return chain.model_copy(update=resolved)
