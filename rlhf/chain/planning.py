"""`--plan` and `--zero-stage auto` of the chain: forecasts of its stages, and the command that a plan proposes."""

import shlex
from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf.chain.options import SECTIONS
from rlhf.chain.stages import STAGES, load
from rlhf.chain.steps import chosen_steps
from rlhf.plan.choose import as_flags
from rlhf.plan.command import WorkloadOf, format_plans, plan_stages, resolve_zero_stage
from rlhf.plan.devices import PlanOptions
from rlhf.plan.forecast import Workload
from rlhf.plan.machine import NODE
from rlhf.storage.manifests import planned_start
from step1_sft import plan as sft_plan
from step2_reward import plan as reward_plan
from step3_ppo import plan as ppo_plan
from step3_ppo.resolved import earlier_models


def workloads(chain: Any) -> tuple[dict[str, tuple[Any, WorkloadOf]], dict[str, str]]:
    """(options and workload function of each chosen stage, models that step 3 starts from)"""
    steps, planned = chosen_steps(chain), {"actor_model": chain.sft.model, "reward_model": chain.reward.model}
    functions: dict[int, WorkloadOf] = {step: load(step).workload for step in steps}
    if 1 in steps:  # later stages start from what it saves
        extended, from_step_1 = sft_plan.added_ids(chain.sft, chain.sft.model), ["actor_model"]
        if planned_start(chain.reward.model, chain.output_dir, {STAGES[1].name: chain.sft.model}):
            planned |= {"reward_model": chain.sft.model, "model": chain.sft.model}  # both stages start from it
            from_step_1.append("reward_model")
        if extended is not None:
            ids = dict.fromkeys(from_step_1, extended[1])
            later: dict[int, Callable[..., Workload]] = {2: reward_plan.workload, 3: ppo_plan.workload}
            functions |= {step: partial(later[step], ids=ids) for step in steps if step in later}
    stages = {SECTIONS[step]: (getattr(chain, SECTIONS[step]), functions[step]) for step in steps}
    return stages, earlier_models(chain.output_dir, planned)


def forecast(chain: Any, processes: int, program: str, argv: list[str]) -> str:
    """The text of `--plan`: memory and disk of every stage, and a command that fits. If no setting of the options fits,
    one with adapters is looked for, then one with adapters on a shared base model.

    program, argv: the command as typed
    """
    stages, model_paths = workloads(chain)
    plans = plan_stages(stages, chain, processes, model_paths)
    text = format_plans(plans)
    for trunk in (False, True):
        if all(plan.proposal is not None for plan in plans):
            break
        trial = {section: (_with_adapter(options, trunk), work) for section, (options, work) in stages.items()}
        plans = plan_stages(trial, chain, processes, model_paths)
    named = zip(stages, plans, strict=True)
    proposals = {section: plan.proposal for section, plan in named if plan.proposal is not None}
    if len(proposals) < len(plans):
        return text
    words = [program.replace("rlhf plan", "rlhf train"), shlex.join(_without_plan(argv))]
    words += _deployment(chain, chain.devices or processes)
    words += [as_flags(options, getattr(chain, section), f"{section}.") for section, options in proposals.items()]
    return f"{text}\n\na command that fits:\n{' '.join(filter(None, words))}"


def _with_adapter(options: Any, trunk: bool) -> Any:
    """The options with LoRA, if they name no adapter. trunk: whether all models share their base"""
    update = {"adapter": options.adapter or "lora", "share_trunk": trunk or options.share_trunk}
    return options.model_copy(update=update)


def _deployment(chain: Any, devices: int) -> list[str]:
    """The options that start as many processes, if the command line does not yet."""
    if chain.deployment_type not in ("auto", "single_gpu") or devices == 1:
        return []
    return ["--deployment-type single_node" if devices <= NODE else "--deployment-type multi_node --hostfile hostfile"]


def _without_plan(argv: list[str]) -> list[str]:
    """The command line without the options that only describe a plan."""
    names = {name.replace("_", "-") for name in PlanOptions.model_fields}
    words = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        described = name.startswith("--") and name[2:].replace("_", "-") in names
        if not described and not (skip and not word.startswith("--")):
            words.append(word)
        skip = described and not equals and name != "--plan"
    return words


def resolve_zero_stages(chain: Any, processes: int) -> Any:
    """Replace `--zero-stage auto` by the first setting that fits, and print it. Raises: UserError if none fits."""
    stages, model_paths = workloads(chain)
    resolved = {
        section: resolve_zero_stage(options, workload, chain, processes, model_paths)
        for section, (options, workload) in stages.items()
    }
    return chain.model_copy(update=resolved)
