"""Options of the chain: what stands at the top and what each stage sets apart. Needs no torch to be imported."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model

from data.config import DataOptions
from rlhf.chain.stages import STAGES
from rlhf.config import Config, parser
from rlhf.config.options import EngineOptions, OutputDir, RunOptions, SharedOptimizerOptions
from rlhf.errors import UserError
from rlhf.launch.hosts import LaunchOptions
from rlhf.plan.options import PlanOptions
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig

SECTIONS = {1: "sft", 2: "reward", 3: "ppo"}


SHORT_HELP = {
    "models and data": ("actor-model", "reward-model", "data-path", "data-split", "chat-template", "max-train-rows"),
    "the run": ("output-dir", "steps", "seed", "overwrite", "report-to", "save-minutes", "export-every"),
    "machine": (
        "deployment-type", "num-processes", "dtype", "zero-stage", "gradient-checkpointing", "micro-batch-size",
        "adapter", "plan",
    ),
    "lengths, in tokens": ("max-prompt-length", "max-length", "ppo.response-length"),
    "step 1, fine-tuning": ("sft.num-train-epochs", "sft.batch-size", "sft.learning-rate"),
    "step 2, the reward model": ("reward.num-train-epochs", "reward.batch-size", "reward.learning-rate"),
    "step 3, reinforcement learning": (
        "ppo.algorithm", "ppo.reward", "ppo.judge", "ppo.total-episodes", "ppo.batch-size", "ppo.kl-coef",
        "ppo.learning-rate", "ppo.critic-learning-rate", "ppo.eval-every",
    ),
}  # fmt: skip
"""What `--help` lists; `--sft.`, `--reward.` and `--ppo.` before a shared option set it for one stage."""
SHARED = (DataOptions, EngineOptions, SharedOptimizerOptions, RunOptions)
"""What every stage has, with one default: the options at the top that sections follow."""


class ChainConfig(DataOptions, EngineOptions, SharedOptimizerOptions, RunOptions, LaunchOptions, PlanOptions):
    """All three stages. An option given here holds for every stage that does not set its own."""

    actor_model: str = "opt-1.3b"
    """pretrained model that becomes the policy: directory, hub id, short name or .yaml"""
    reward_model: str = "opt-350m"
    """pretrained model that becomes reward model and critic: directory, hub id, short name or .yaml"""
    deployment_type: Literal["single_gpu", "single_node", "multi_node"] = "single_gpu"
    """single_gpu: one process, on the CPU where there is no GPU; single_node: one process per visible GPU;
    multi_node: the same on every host of --hostfile; under torchrun, deepspeed, accelerate or srun: as they started"""
    num_processes: int | None = Field(None, ge=1)
    """processes of single_node; by default the number of visible GPUs"""
    steps: tuple[Literal[1, 2, 3], ...] | None = Field(None, min_length=1)
    """the part of the chain to run; by default step 3 and those it needs. Inputs of the rest are found in the output
    directory"""
    output_dir: OutputDir = "runs/rlhf"
    """directory of the run: step1_sft/, step2_reward/, step3_ppo/"""
    sft: SFTConfig = SFTConfig()
    """step 1, supervised fine-tuning; what is not set here is as at the top"""
    reward: RewardConfig = RewardConfig()
    """step 2, the reward model; what is not set here is as at the top"""


def chain_config(argv: list[str]) -> type[ChainConfig]:
    """ChainConfig with the options of the chosen algorithm as its `ppo` section."""
    from step3_ppo import algorithms  # here, as it imports torch

    algorithm = parser.peek(argv, "ppo.algorithm", "ppo")
    options = algorithms.options(algorithm)
    described = Field(options(algorithm=algorithm), description="step 3, PPO; what is not set here is as at the top")
    return create_model("ChainConfig", __base__=ChainConfig, ppo=(options, described))


def followed(section: str) -> dict[str, str]:
    """The options of a section that follow one at the top, and the name of that."""
    shared = [name for options in SHARED for name in options.model_fields]
    model = {"sft": {"model": "actor_model"}, "reward": {"model": "reward_model"}}.get(section, {})
    return dict(zip(shared, shared, strict=True)) | model


def set_apart(argv: list[str]) -> set[str]:
    """The options that sections set for themselves, as `sft.max_length`.

    Those are all that the command line names; and what a file gives another value than at its top, unless the command
    line has the option at the top, which is over every file. (A saved config.yaml has every value written out.)
    """
    typed = given(argv)
    found = set(typed)
    for tree in _trees(argv):
        for section in SECTIONS.values():
            own = tree.get(section) or {}
            follows = followed(section)
            found |= {
                f"{section}.{name}"
                for name, value in own.items()
                if name not in follows
                or (follows[name] not in typed and (follows[name] not in tree or tree[follows[name]] != value))
            }
    return found


def given(argv: list[str]) -> set[str]:
    """The options on the command line, spelled `sft.max_length`."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return names | {re.sub(r"(^|\.)no_", r"\1", name) for name in names}


def _trees(argv: list[str]) -> list[dict[str, Any]]:
    files, _ = parser.split_config_files(argv)
    return [parser.read_yaml(file) for file in files]


def resolve(chain: Any, argv: list[str]) -> Any:
    """The chain with every section's options filled in from the top.

    An option that is given nowhere, and has another default in a section (an algorithm of the user's, say), keeps that.
    Raises: UserError if a section names a directory of its own.
    """
    own = set_apart(argv)
    anywhere = given(argv).union(*_trees(argv))
    sections = {}
    for section in SECTIONS.values():
        if f"{section}.output_dir" in own:
            raise UserError(
                f"{section}.output_dir: the stages of a chain share one directory; name it with --output-dir"
            )
        options = getattr(chain, section)
        taken = {
            name: getattr(chain, top)
            for name, top in followed(section).items()
            if f"{section}.{name}" not in own and (top in anywhere or not _differs(options, name, top))
        }
        sections[section] = options.model_copy(update=taken)
    sections["ppo"] = sections["ppo"].model_copy(update=dict(_inputs_named_above(chain, argv)))
    return chain.model_copy(update=sections)


def changed(chain: Any) -> dict[str, Any]:
    """What differs from the defaults: of a section also from what it follows at the top. `--config` reads it back."""
    tree = parser.changed(chain, type(chain)())
    for section in SECTIONS.values():
        own = getattr(chain, section)
        follows = {
            name: getattr(chain, top)
            for name, top in followed(section).items()
            if top in tree or not _differs(own, name, top)
        }
        found = parser.changed(own, type(own)().model_copy(update=follows))
        tree = {name: value for name, value in tree.items() if name != section} | ({section: found} if found else {})
    return tree


def _differs(section: Config, name: str, top: str) -> bool:
    """Whether a shared option has another default in the section than at the top."""
    if name != top or name == "output_dir":
        return False
    return bool(type(section).model_fields[name].default != ChainConfig.model_fields[top].default)


def _inputs_named_above(chain: Any, argv: list[str]) -> Iterator[tuple[str, str]]:
    """With step 3 and not the step before, a model on the command line is one that PPO starts from, unless it is what
    the stage in the output directory started from: then the user repeats a command, and means that stage's."""
    if chain.steps is None or 3 not in chain.steps:
        return
    for step, name in ((1, "actor_model"), (2, "reward_model")):
        place = getattr(chain, name)
        if step in chain.steps or getattr(chain.ppo, name) is not None or name not in given(argv):
            continue
        made = Path(chain.output_dir) / STAGES[step].name
        if not made.is_dir():
            yield name, place
            continue
        from rlhf.storage import manifests

        start = manifests.read_manifest(made)["config"]["model"]
        if start != place:
            option = name.replace("_", "-")
            raise UserError(
                f"--{option} {place}: {made} was made from '{start}'; leave the option out to go on from there, "
                f"or write --ppo.{option} to start from another"
            )
