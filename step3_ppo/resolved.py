"""Which models step 3 starts from, and why: one answer for the checks, loading and the model cards.

A model is one that an option names, or the output of step 1 or 2. A chain checks all stages before it runs the first:
an output that does not exist yet is then represented by the model from which its stage starts (`planned`). The plan of
`--plan` (plan.py) needs less: no model has to be on this machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf import plugins
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.storage.manifests import planned_start, resolve_model_path
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer, same_ids
from step3_ppo import algorithms
from step3_ppo.config import MAKERS, POLICY, REWARD, SHARED, Step3Config

FOLDERS = {"actor_model": ("actor", "model"), "reward_model": ("model", "critic"), "critic_model": ("critic", "model")}
"""Folders of an earlier stage that may hold each model, by option."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The models that step 3 starts from, by option: actor_model, reward_model, critic_model; those that are needed."""

    config: Step3Config
    """the options with the path of every model; `critic_model` is what `choose_critic` returns"""
    paths: Mapping[str, str]
    """where each model is; for one of `planned` the path there"""
    planned: Mapping[str, str]
    """of the models that a stage of the same command has still to make: the model from which that stage starts"""


def resolve_models(config: Step3Config, planned: Mapping[str, str] | None = None) -> Resolved:
    """Find every model, and decide what the critic starts from.

    planned: stages that run before this one, and the model that each starts from, which stands for the stage's output
    Raises: UserError if a model does not exist, its stage is unfinished, or a named critic reads other ids.
    """
    required = inputs(config)
    to_make = {
        name: base
        for name, path in required.items()
        if (base := planned_start(path, config.output_dir, planned or {})) is not None
    }
    for name in (name for name in MAKERS if name in required and name not in to_make):
        if getattr(config, name) is None and not Path(required[name]).is_dir():
            cure = f"run {MAKERS[name]} first, or name one with --{name.replace('_', '-')}"
            raise UserError(f"{name} not found at {required[name]}; {cure}")
    paths = {name: resolve_model_path(to_make.get(name, path), *FOLDERS[name]) for name, path in required.items()}
    models = config.model_copy(update=paths)
    if needs_critic(config):
        models = models.model_copy(update={"critic_model": choose_critic(config.critic_model, models)})
    return Resolved(models, paths, to_make)


def inputs(config: Step3Config) -> dict[str, str]:
    """Paths of the models that this stage starts from. A model that no option names is the output of an earlier
    stage."""
    paths = {name: getattr(config, name) or f"{config.output_dir}/{maker}" for name, maker in MAKERS.items()}
    starts_critic = critic_starts_from_reward_model(config)
    if starts_critic:
        paths["critic_model"] = paths["reward_model"]
    elif needs_critic(config) and config.critic_model not in (None, POLICY, SHARED):
        paths["critic_model"] = str(config.critic_model)
    if not starts_critic and not uses_reward_model(config):
        del paths["reward_model"]
    return paths


def needs_critic(config: Step3Config) -> bool:
    """Whether the algorithm trains a critic."""
    return algorithms.load(config).value_loss is not None


def critic_starts_from_reward_model(config: Step3Config) -> bool:
    """Whether there is a critic that starts from the run's reward model: told so, or because that scores or is named.

    Its values do not predict other scores: by a function of words, the demo's policy gained 0.23 and 0.11 in 12
    iterations with a critic from the reward model, 0.90 and 0.31 with one from the policy (two seeds, 2026-11-27).
    """
    scores = None in learned_models(config.model_copy(update={"judge": None}))
    suits = scores or config.reward_model is not None
    return needs_critic(config) and (config.critic_model == REWARD or (config.critic_model is None and suits))


def uses_reward_model(config: Step3Config) -> bool:
    """Whether a score source or the judge is the reward model of the run."""
    return None in learned_models(config)


def source_specs(config: Step3Config) -> list[str]:
    """The specs of all score sources, the judge included, without weights."""
    judge = [] if config.judge is None else [config.judge]
    return [plugins.split_weight(spec)[1] for spec in config.reward] + judge


def learned_models(config: Step3Config) -> list[str | None]:
    """The model that each `learned` score source names, the judge included; None: the reward model of the run."""
    parsed = (plugins.parse_spec(spec) for spec in source_specs(config))
    return [options.get("model") or None for name, options in parsed if name == "learned"]


def reward_model_path(config: Step3Config, model: str | None) -> str:
    """The path of one of `learned_models`. config: with the paths of all models"""
    return resolve_model_path(model or str(config.reward_model), "model", "critic")


def choose_critic(option: str | None, models: Step3Config) -> str:
    """What the critic starts from: the word `policy` or `shared`, or the path of a scalar model.

    option: --critic-model; models: the options with the paths of all models, that of the critic included, unless it
    starts from no reward model. A critic reads the actor's ids. So by default it starts from a reward model with the
    same tokenizer and template, otherwise from the policy.
    Raises: UserError if the model that the option names reads other ids.
    """
    if option in (POLICY, SHARED):
        return option
    if models.critic_model is None:
        return POLICY
    path = models.critic_model
    if _reads_same_ids(models, path):
        return path
    if option is None:
        return POLICY
    raise UserError(
        f"critic '{path}': its tokenizer or chat template gives other ids than that of the actor "
        f"'{models.actor_model}'; expected models of one family: choose another with --critic-model, or add a new "
        f"value head to the actor's model with --critic-model {POLICY}"
    )


def describe_critic(config: Step3Config, models: Step3Config) -> str | None:
    """A line for the user: what `choose_critic` has chosen, which is `models.critic_model`, and why; without a critic,
    which options of one have no effect. None: nothing to say. config: as the user wrote it"""
    if not needs_critic(models):
        rate = ("critic_learning_rate",) if models.adapter is None else ()  # an adapter has its own
        changed = {name: getattr(models, name) for name in ("critic_model", *rate)}
        names = [f"{k} {v}" for k, v in changed.items() if v != Step3Config.model_fields[k].default]
        return f"without effect, because {models.algorithm} has no critic: {', '.join(names)}" if names else None
    source = f"'{models.critic_model}'"
    if models.critic_model == SHARED:
        return "the critic is a new value head on the actor (--critic-model shared)"
    if models.critic_model == POLICY:
        source = f"'{models.actor_model}', the policy, with a new value head"
    if config.critic_model is not None:
        reason = f"--critic-model {config.critic_model}"
    elif not critic_starts_from_reward_model(config):
        reason = "no score source is the run's reward model"
    elif models.critic_model == POLICY:
        reason = f"the reward model '{models.reward_model}' has another tokenizer or chat template"
    else:
        reason = "the reward model, with the actor's tokenizer"
    return f"the critic starts from {source} ({reason})"


def _reads_same_ids(models: Step3Config, path: str) -> bool:
    """Whether the tokenizer and template of the model at `path` give the same ids as the actor's."""
    actor, other = (
        prepare_tokenizer(load_tokenizer(resolve(str(model))), models.chat_template, variables)
        for model, variables in ((models.actor_model, models.chat_template_kwargs), (path, None))
    )
    return same_ids(actor, other)


def earlier_models(output_dir: str, planned: Mapping[str, str]) -> dict[str, str]:
    """Paths of the models that this stage takes from earlier stages: the trained models that exist, else `planned`, the
    models that those stages will start from."""
    trained = {name: Path(output_dir) / maker / "model" for name, maker in MAKERS.items()}
    return {**planned, **{name: str(model) for name, model in trained.items() if (model / "config.json").is_file()}}
