"""Which steps of the chain a command runs, and which command comes next."""

import shlex
import sys
from itertools import takewhile
from pathlib import Path

from data.config import DataOptions
from rlhf.chain.options import ChainConfig
from rlhf.chain.stages import STAGES
from rlhf.launch.failure_summary import on_every_host
from rlhf.plan.choose import as_flags
from rlhf.roles import inputs
from rlhf.storage.manifests import MANIFEST, planned_start
from step3_ppo.roles import named_roles


def needed(chain: ChainConfig) -> tuple[int, ...]:
    """Step 3, and the steps before it whose models it starts from."""
    paths = inputs(named_roles(chain.ppo)).values()
    reward = any(_makes(chain, 2, path) for path in paths)
    actor = any(_makes(chain, 1, path) for path in (*paths, *([chain.reward.model] if reward else [])))
    return (*([1] if actor else []), *([2] if reward else []), 3)


def _makes(chain: ChainConfig, step: int, path: str) -> bool:
    """Whether that step of the chain makes the model at `path`."""
    return planned_start(path, chain.output_dir, {STAGES[step].name: path}) is not None


def chosen_steps(chain: ChainConfig) -> tuple[int, ...]:
    """The steps that the command names, sorted; by default the steps that are needed."""
    return tuple(sorted(set(chain.steps))) if chain.steps else needed(chain)


def describe_skipped(chain: ChainConfig) -> list[str]:
    """A line for each step that is skipped because step 3 does not need it."""
    if chain.steps:
        return []
    reasons = {
        1: "step 3 starts from other models, which the options name",
        2: "step 3 uses no reward model of this run: neither its score sources nor a critic need one",
    }
    return [
        f"{STAGES[step].name}: skipped: {reasons[step]} (--steps 1 2 3 runs it)" for step in {1, 2} - {*needed(chain)}
    ]


def next_step(chain: ChainConfig, program: str) -> str:
    """The next command of the user, and before it the path of a policy if there is one. program: what was run, as
    `rlhf train`"""
    rlhf = ["rlhf"] if program.startswith("rlhf ") else [sys.orig_argv[0], "-m", "rlhf"]
    done = [step for step, stage in STAGES.items() if (Path(chain.output_dir) / stage.name / MANIFEST).is_file()]
    if chain.steps == (2,) and chain.ALONE:
        return "next: " + on_every_host([*rlhf, "ppo", *_data_of_step_3(chain, done)])
    last = chain.steps[0] if chain.steps and chain.ALONE else 3
    if last not in done:
        steps = [str(step) for step in needed(chain) if step not in done]
        typed = takewhile(lambda word: not word.startswith("--"), sys.orig_argv)
        return "next: " + on_every_host([*typed, "--steps", *steps, "--output-dir", chain.output_dir])
    stage = STAGES[last]
    return (
        f"The {'tuned policy' if last == 3 else 'fine-tuned model'} is {chain.output_dir}/{stage.name}/"
        f"{stage.models[0]}: AutoModelForCausalLM.from_pretrained loads it.\n"
        f"next: {shlex.join([*rlhf, 'chat', chain.output_dir])}"
    )


def _data_of_step_3(chain: ChainConfig, done: list[int]) -> list[str]:
    """Options of step 3 after step 2 alone: the policy is that of step 1, if there is one, else what the reward model
    started from."""
    data = DataOptions(**{name: getattr(chain.reward, name) for name in DataOptions.model_fields})
    if data.data_split == (0, 1, 0):
        data = data.model_copy(update={"data_split": (0, 0, 1)})
    policy = [] if 1 in done else ["--actor-model", chain.reward.model]
    return [*policy, *shlex.split(as_flags(data, DataOptions())), "--output-dir", chain.output_dir]
