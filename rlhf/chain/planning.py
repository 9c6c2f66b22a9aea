"""`--plan` and `--zero-stage auto` of the chain: forecasts of its stages, and the command that a plan proposes."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.chain.options import SECTIONS, prefix
from rlhf.chain.stages import STAGES, load
from rlhf.chain.steps import chosen_steps
from rlhf.config.command_line import without
from rlhf.hub.short_names import resolve
from rlhf.plan.choose import as_flags
from rlhf.plan.command import AUTO, StagePlan, WorkloadOf, format_plans, most, plan_stages, resolve_zero_stage
from rlhf.plan.devices import PlanOptions
from rlhf.plan.machine import NODE
from rlhf.plan.sizes import local_tokenizer
from rlhf.plugins import parse_spec
from rlhf.roles import Role


def workloads(chain: Any) -> dict[str, tuple[Any, WorkloadOf]]:
    """(options, workload) of each chosen stage, by section. Models that earlier stages have made are taken, else those
    from which these stages start.

    Raises: UserError.
    """
    steps, planned = chosen_steps(chain), dict[str, Role]()
    stages: dict[str, tuple[Any, WorkloadOf]] = {}
    # What earlier steps start from represents their models; of a stage alone no such options are known.
    for step in steps if chain.ALONE else range(1, max(steps) + 1):
        stage, options = load(step), getattr(chain, SECTIONS[step])
        if step not in steps:
            role = stage.named_roles(options)[0]
        else:
            table = stage.roles(options, planned, local_tokenizer)
            role, stages[SECTIONS[step]] = table[0], (options, partial(stage.workload, table))
        trained = Path(chain.output_dir) / STAGES[step].name / "model"
        planned[STAGES[step].name] = replace(role, path=str(trained)) if (trained / "config.json").is_file() else role
    return stages


def forecast(chain: Any, processes: int, program: str, argv: list[str]) -> str:
    """The text of `--plan`: memory and disk of every stage, a command that fits, and what adapters take. The command
    has adapters only if nothing else fits.

    program, argv: the command as typed
    """
    plans = {"": _plans(chain, processes)}
    plans |= {name: _plans(leaner, processes) for name, leaner in _leaner(chain)}
    text = format_plans([*plans[""].values()])
    fitting = (by_section for by_section in plans.values() if all(plan.proposal for plan in by_section.values()))
    if proposed := next(fitting, None):
        words = [program.replace("rlhf plan", "rlhf train"), shlex.join(without(argv, PlanOptions.model_fields))]
        words += _deployment(chain, chain.devices or processes)
        words += [
            as_flags(plan.proposal, getattr(chain, section), prefix(chain, section))
            for section, plan in proposed.items()
            if plan.proposal is not None
        ]
        text += f"\n\na command that fits:\n{' '.join(filter(None, words))}"
    lean = [f"{name}: {most([*by_section.values()])}" for name, by_section in plans.items() if name]
    return "\n\n".join([text, *([f"most on a device {'; '.join(lean)}"] * bool(lean))])


def _plans(chain: Any, processes: int) -> dict[str, StagePlan]:
    """The plan of each chosen stage, by section."""
    stages = workloads(chain)
    by_prefix = {prefix(chain, section): stage for section, stage in stages.items()}
    return dict(zip(stages, plan_stages(by_prefix, chain, processes), strict=True))


def _leaner(chain: Any) -> Iterator[tuple[str, Any]]:
    """(words, chain) with LoRA where no adapter is named, then with all models of step 3 on one base model, from which
    the reward model starts too. Nothing for a model of random weights, which adapters would leave as they are."""
    sections = {section: getattr(chain, section) for section in SECTIONS.values()}
    if resolve(chain.sft.model).endswith((".yaml", ".yml")):
        return
    adapted = {name: o.model_copy(update={"adapter": o.adapter or "lora"}) for name, o in sections.items()}
    if adapted != sections:
        yield "with LoRA", chain.model_copy(update=adapted)
    if 3 in chosen_steps(chain) and not chain.ppo.share_trunk and parse_spec(adapted["ppo"].adapter)[0] == "lora":
        shared = {name: o.model_copy(update={"share_trunk": True}) for name, o in adapted.items()}
        shared["reward"] = shared["reward"].model_copy(update={"model": chain.sft.model})
        yield "with LoRA and a shared trunk", chain.model_copy(update=shared)


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
