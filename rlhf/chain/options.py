"""Options of the chain: those at the top, and the sections of the stages. Importing this imports no torch."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, create_model, model_validator

from data.config import DataOptions
from rlhf.chain.stages import STAGES
from rlhf.config import Config, Tree, deepspeed_json, parser
from rlhf.config.options import EngineOptions, ModelPath, OutputDir, RunOptions, SharedOptimizerOptions
from rlhf.config.secrets import refuse_secrets
from rlhf.errors import UserError
from rlhf.launch.hosts import LaunchOptions
from rlhf.plan.devices import PlanOptions
from rlhf.training.stage_process import fast_imports, with_adapter_rates
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo import algorithm_options
from step3_ppo.config import Step3Config

StageOptions = SFTConfig | RewardConfig | Step3Config
SECTIONS = {1: "sft", 2: "reward", 3: "ppo"}
"""sections of options, by step"""
SHORT_HELP = {
    "models and data": ("actor-model", "reward-model", "data-path", "data-split", "chat-template", "max-train-rows"),
    "the run": ("output-dir", "steps", "seed", "overwrite", "report-to", "save-minutes", "rehearse"),
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
"""Options that `--help` lists. A shared option with the prefix `--sft.`, `--reward.` or `--ppo.` is for one stage."""
SHARED = (DataOptions, EngineOptions, SharedOptimizerOptions, RunOptions)
"""Options at the top that every stage has too; by default a section takes their values."""


class ProcessOptions(LaunchOptions, PlanOptions):
    """How the stages run: as which processes, where, and whether in small first or not at all."""

    deployment_type: Literal["auto", "single_gpu", "single_node", "multi_node"] = "auto"
    """single_gpu: one process, on the CPU where there is no GPU; single_node: one process per visible GPU;
    multi_node: the same on every host of --hostfile; under torchrun, deepspeed, accelerate or srun: the processes that
    they have started; auto: what --hostfile, --include, --num-gpus or --num-processes imply, else single_gpu"""
    num_processes: int | None = Field(None, ge=1)
    """processes of single_node; by default the number of visible GPUs"""
    require: tuple[str, ...] = ()
    """conditions on held-out numbers, `reward.eval_accuracy > 0.6` (of a stage alone without `reward.`), each judged by
    the end of its 95 % interval that is nearer to the bound; when one is missed at the end of its stage, the chain ends
    with code 4"""
    rehearse: bool = False
    """before the run, two steps of each stage with models of two layers, with everything that the run will write, in a
    folder that is removed: what would fail late fails within minutes"""


class ChainConfig(DataOptions, EngineOptions, SharedOptimizerOptions, RunOptions, ProcessOptions):
    """All three stages. An option given here holds for every stage that does not set its own."""

    ALONE: ClassVar[bool] = False
    """whether the user has typed a stage by itself, with its options as they are there"""

    actor_model: ModelPath = "opt-1.3b"
    """pretrained model that becomes the policy: directory, hub id, short name or .yaml"""
    reward_model: ModelPath | None = None
    """pretrained model that becomes reward model and critic: directory, hub id, short name or .yaml; by default the
    actor's"""
    steps: tuple[Literal[1, 2, 3], ...] | None = Field(None, min_length=1)
    """steps of the chain to run; by default step 3 and the steps that it needs. Models of other steps are read from the
    output directory"""
    output_dir: OutputDir = "runs/rlhf"
    """directory of the run: step1_sft/, step2_reward/, step3_ppo/"""
    sft: SFTConfig = SFTConfig()
    """step 1, supervised fine-tuning; an option that is not set here is as at the top"""
    reward: RewardConfig = RewardConfig()
    """step 2, the reward model; an option that is not set here is as at the top"""
    ppo: Step3Config = Step3Config()
    """step 3, PPO; an option that is not set here is as at the top"""

    @model_validator(mode="before")
    @classmethod
    def _reward_model_is_the_actors(cls, values: Tree) -> Tree:
        """Unless another one is named."""
        model = values.get("reward_model") or values.get("actor_model") or cls.model_fields["actor_model"].default
        section = values.get("reward", {})
        section = {"model": model, **section} if isinstance(section, dict) else section
        return values | {"reward_model": model, "reward": section}


def chain_config(argv: list[str]) -> type[ChainConfig]:
    """ChainConfig with the options of the chosen algorithm as its `ppo` section."""
    algorithm = parser.peek(argv, "ppo.algorithm", "ppo")
    with fast_imports():  # of a user's algorithm
        return _with_section(algorithm_options.options(algorithm), algorithm)


@functools.cache
def _with_section(options: type[Step3Config], algorithm: str) -> type[ChainConfig]:
    """Made once: for every class pydantic searches the sources of all callers, 0.013 s in a program, more in a test."""
    described = Field(options(algorithm=algorithm), description=ChainConfig.model_fields["ppo"].description)
    return create_model("ChainConfig", __base__=ChainConfig, ppo=(options, described))


def shared_options(section: str) -> dict[str, str]:
    """Options of a section that by default have the value of an option at the top: {name: name at the top}."""
    shared = [name for options in SHARED for name in options.model_fields]
    model = {"sft": {"model": "actor_model"}, "reward": {"model": "reward_model"}}.get(section, {})
    return dict(zip(shared, shared, strict=True)) | model


def spread(layer: parser.Layer) -> parser.Layer:
    """The layer with its shared options in every section that does not set them itself: a stage has them from there."""
    sections = {}
    for section in SECTIONS.values():
        shared = {name: layer.tree[top] for name, top in shared_options(section).items() if top in layer.tree}
        section_values = layer.tree.get(section) or {}
        if isinstance(section_values, dict) and (shared or section_values):
            sections[section] = shared | section_values
    return parser.Layer(layer.source, layer.tree | sections)


def combine(options: type[ChainConfig], layers: list[parser.Layer]) -> ChainConfig:
    """The chain of these layers over its defaults. Raises: UserError."""
    top = {name: options.model_fields[name].default for name in ("output_dir", "actor_model")}
    return parser.combine(options, [spread(parser.Layer("defaults", top)), *layers])


def read(
    argv: list[str],
    overlay: parser.Overlay = parser.NO_OVERLAY,
    check: Callable[[ChainConfig], None] = lambda _: None,
) -> ChainConfig:
    """The chain of a command line: of what files, overlay and command line set, a later one decides, also for a section
    of an earlier one.

    check: of the chain, before torch is imported
    Raises: UserError for a mistake, also if a section sets its own output directory.
    """
    options = chain_config(argv)
    layers = [spread(layer) for layer in parser.layers(options, argv, overlay)]
    origins = parser.origins(layers)
    chain = combine(options, layers)
    refuse_secrets(chain.model_dump(mode="json"))
    check(chain)
    sections = {section: getattr(chain, section) for section in SECTIONS.values()}
    for section, stage in sections.items():
        if stage.output_dir != chain.output_dir:
            raise UserError(
                f"{section}.output_dir: the stages of a chain share one directory; name it with --output-dir"
            )
        sections[section] = with_adapter_rates(stage, {name.removeprefix(f"{section}.") for name in origins})
    named = dict(_inputs_named_above(chain, origins))
    return chain.model_copy(update=sections | {"ppo": sections["ppo"].model_copy(update=named)})


def prefix(chain: ChainConfig, section: str) -> str:
    """What the options of a stage begin with on the command line: `ppo.`, or nothing if the stage is alone."""
    return "" if chain.ALONE else f"{section}."


def typed_names(chain: ChainConfig, section: str) -> dict[str, str]:
    """The name on the command line of each option of a section that has another one there."""
    if chain.ALONE:
        return {}
    top = shared_options(section)
    at_the_top = {*ChainConfig.model_fields} - {*SECTIONS.values()}
    own = {name: f"{section}.{name}" for name in type(getattr(chain, section)).model_fields if name not in at_the_top}
    return {name.replace("_", "-"): typed.replace("_", "-") for name, typed in (own | top).items() if typed != name}


def overlay(argv: list[str], over: int) -> parser.Overlay:
    """The options that a DeepSpeed JSON sets, over the first `over` config files. Raises: UserError."""
    tree = deepspeed_json.options(_json(argv), ChainConfig)
    stages: dict[str, type[Config]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": Step3Config}
    for section, options in stages.items():
        settings = deepspeed_json.options(_json(argv, section), options)
        tree |= {section: settings} if settings else {}
    return parser.Overlay(tree, deepspeed_json.CONFIG, over)


def require_agreement(argv: list[str], chain: ChainConfig) -> None:
    """Raises: UserError if an option of a section has another value than a DeepSpeed JSON sets."""
    for section in SECTIONS.values():
        deepspeed_json.require_agreement(_json(argv, section), getattr(chain, section), section)


def _json(argv: list[str], section: str = "") -> str:
    """The DeepSpeed JSON that a command line names, for one section if that has its own; empty without one."""
    whole = parser.peek(argv, deepspeed_json.CONFIG, "")
    return parser.peek(argv, f"{section}.{deepspeed_json.CONFIG}", whole) if section else whole


def without_one_time_options(chain: ChainConfig) -> ChainConfig:
    """The options to save for later commands: `overwrite`, `steps` and `rehearse` hold for one."""
    once = {name: getattr(chain, name).model_copy(update={"overwrite": False}) for name in SECTIONS.values()}
    return chain.model_copy(update={**once, "overwrite": False, "steps": None, "rehearse": False})


def changed(chain: ChainConfig) -> Tree:
    """The options that differ from their defaults and, in a section, from the top. `--config` can read them."""
    defaults = combine(type(chain), [])
    top = {name: value for name, value in parser.changed(chain, defaults).items() if name not in SECTIONS.values()}
    inherited = parser.merge(defaults.model_dump(mode="json"), spread(parser.Layer("", top)).tree)
    if chain.reward_model == chain.actor_model:
        top.pop("reward_model", None)
    sections = {name: getattr(chain, name).model_dump(mode="json") for name in SECTIONS.values()}
    return top | parser.difference(sections, inherited)


def _inputs_named_above(chain: ChainConfig, origins: parser.Origins) -> Iterator[tuple[str, str]]:
    """Models on the command line that PPO starts from: with step 3, without the step that trains the model.

    A model from which the stage in the output directory started is none of them: the user has repeated a command, and
    means the model that the stage has trained.
    Raises: UserError if the stage in the output directory started from another model.
    """
    if chain.steps is None or 3 not in chain.steps:
        return
    for step, name in ((1, "actor_model"), (2, "reward_model")):
        model_path = getattr(chain, name)
        if step in chain.steps or getattr(chain.ppo, name) is not None or origins.get(name) != parser.COMMAND_LINE:
            continue
        directory = Path(chain.output_dir) / STAGES[step].name
        if not directory.is_dir():
            yield name, model_path
            continue
        from rlhf.storage import manifests

        start = manifests.read_manifest(directory)["config"]["model"]
        if start != model_path:
            option = name.replace("_", "-")
            raise UserError(
                f"--{option} {model_path}: {directory} was made from '{start}'; remove the option to start from its "
                "result, "
                f"or write --ppo.{option} to start from another"
            )
