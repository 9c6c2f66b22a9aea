"""The models of step 3: actor, reference, critic, and the reward models that score and judge.

The actor is the policy that is trained, and the reference what it starts from. The critic starts from the reward model,
from the actor's model with a new head, or from a model that an option names. A chain checks all stages before it runs
the first: a model that does not exist yet is then represented by the one from which its stage starts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlhf import generation, plugins
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import is_adapter
from rlhf.maths.intervals import power
from rlhf.models.adapter_files import base_of, on_base
from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import RolloutWork, Workload, dtype_on
from rlhf.roles import (
    NO_PLANNED,
    FindTokenizer,
    Part,
    Planned,
    Role,
    inputs,
    loaded,
    locate,
    role_of,
    tokenizer_of,
    with_options,
)
from rlhf.storage.manifests import planned_start
from rlhf.text.tokenizer import prepare_tokenizer, same_ids
from step3_ppo import algorithms
from step3_ppo.config import MAKERS, POLICY, REWARD, SHARED, STAGE, Step3Config

ACTOR = Part("actor", "actor_model", ("actor", "model"), "lm", lambda config: config.actor_options, "policy")
REFERENCE = Part("reference", "actor_model", ACTOR.folders, "lm", lambda config: config.reference_options, "reference")
CRITIC = Part("critic", "critic_model", ("critic", "model"), "scalar", lambda config: config.critic_options, "critic")
REWARD_MODEL = Part(
    "reward model", "reward_model", ("model", "critic"), "scalar", lambda config: config.reward_model_options, "reward"
)


def named_roles(config: Step3Config) -> tuple[Role, ...]:
    """The models as the options name them, or as an earlier stage makes them. Reads no file."""
    actor, reward = (getattr(config, option) or f"{config.output_dir}/{maker}" for option, maker in MAKERS.items())
    trunk, adapter = config.share_trunk, config.adapter
    table = [
        Role(ACTOR, actor, config.actor_options, adapter, inputs={"actor_model": actor}),
        # under an adapter that can be switched off, the actor's weights are those of the reference
        Role(REFERENCE, actor, config.reference_options, on_trunk=trunk, of=None if adapter is None else ACTOR),
    ]
    if needs_critic(config):
        table.append(_named_critic(config, actor, reward))
    score = partial(Role, REWARD_MODEL, options=config.reward_model_options, on_trunk=trunk)
    for model in learned_models(config):
        names = {"reward_model": reward} if model is None else {}
        table.append(score(path=model or reward, adapter=adapter if trunk else None, inputs=names))
    return tuple(table)


def _named_critic(config: Step3Config, actor: str, reward: str) -> Role:
    """actor, reward: paths of the policy and of the run's reward model"""
    option = config.critic_model
    critic = partial(
        Role, CRITIC, options=config.critic_options, adapter=config.adapter, on_trunk=config.share_trunk,
        reason=f"--critic-model {option}",
    )  # fmt: skip
    if option == SHARED:
        return critic(path=actor, start=ACTOR, of=ACTOR)
    if option == POLICY:
        return critic(path=actor, start=ACTOR)
    if option is None and not _reward_model_suits_critic(config):
        return critic(path=actor, start=ACTOR, reason="no score source is the run's reward model")
    if option not in (None, REWARD):
        return critic(path=option, inputs={"critic_model": option})
    names = {"reward_model": reward, "critic_model": reward}
    by_reward = critic(path=reward, start=REWARD_MODEL, inputs=names)
    return by_reward if option else replace(by_reward, reason="the reward model, with the actor's tokenizer")


def roles(config: Step3Config, planned: Planned = NO_PLANNED, find: FindTokenizer = tokenizer_of) -> tuple[Role, ...]:
    """The models, found, and what depends on them: where the critic starts, and what shares the base model.

    planned: stages that run before this one, and the role that each trains
    Raises: UserError if a model does not exist, its stage is unfinished, or the critic of an option reads other ids.
    """
    named = named_roles(config)
    _require_outputs(config, inputs(named), planned)
    actor, *others = (locate(role, config.output_dir, planned) for role in named)
    base = base_of(resolve(actor.path)) if config.share_trunk else ""
    table = [actor]
    for role in others:
        if role.part is REFERENCE and role.on_trunk and (role.planned or is_adapter(Path(actor.path))):
            role = replace(role, of=None, adapter=config.adapter)  # a frozen copy of the actor's adapter
        elif role.part is REWARD_MODEL and not (role.inputs or role.planned or on_base(role.path, base)):
            role = replace(role, on_trunk=False, adapter=None)
        elif role.part is CRITIC and role.inputs and not _reads_same_ids(config, actor, role, find):
            role = _from_policy(config, actor, role)
        table.append(role)
    return tuple(table)


def _require_outputs(config: Step3Config, paths: dict[str, str], planned: Planned) -> None:
    """Raises: UserError for the output of an earlier stage that is neither there nor planned."""
    for option, maker in MAKERS.items():
        path = paths.get(option)
        if path is None or getattr(config, option) is not None:
            continue
        if planned_start(path, config.output_dir, planned) is None and not Path(path).is_dir():
            cure = f"run {maker} first, or name one with --{option.replace('_', '-')}"
            raise UserError(f"{option} not found at {path}; {cure}")


def _reads_same_ids(config: Step3Config, actor: Role, critic: Role, find: FindTokenizer) -> bool:
    """Whether the tokenizers and templates of both models give the same ids. Without them on this machine, in a plan,
    that is expected, but for tokens that an earlier stage adds."""
    if actor.ids != critic.ids:
        return False
    first, second = find(actor.path), find(critic.path)
    if first is None or second is None:
        return True
    own = prepare_tokenizer(first, config.chat_template, config.chat_template_kwargs)
    return same_ids(own, prepare_tokenizer(second, config.chat_template))


def _from_policy(config: Step3Config, actor: Role, critic: Role) -> Role:
    """The critic of a reward model with other ids: by default a new head on the policy's model, because it reads the
    actor's ids. Raises: UserError if an option names the reward model."""
    if config.critic_model is not None:
        added = "" if actor.ids == critic.ids else " with the tokens that an earlier stage adds"
        raise UserError(
            f"critic '{critic.path}': its tokenizer or chat template gives other ids than that of the actor "
            f"'{actor.path}'{added}; expected models of one family: choose another with --critic-model, or add a new "
            f"value head to the actor's model with --critic-model {POLICY}"
        )
    reason = f"the reward model '{critic.path}' has another tokenizer or chat template"
    return replace(critic, path=actor.path, start=ACTOR, planned=actor.planned, ids=actor.ids, reason=reason)


def needs_critic(config: Step3Config) -> bool:
    """Whether the algorithm trains a critic."""
    return algorithms.load(config).value_loss is not None


def _reward_model_suits_critic(config: Step3Config) -> bool:
    """Whether by default a critic starts from the run's reward model: because that scores or is named.

    Its values do not predict other scores: by a function of words, the demo's policy gained 0.23 and 0.11 in 12
    iterations with a critic from the reward model, 0.90 and 0.31 with one from the policy (two seeds, 2026-11-27).
    """
    return None in learned_models(config.model_copy(update={"judge": None})) or config.reward_model is not None


def source_specs(config: Step3Config) -> list[str]:
    """The specs of all score sources, the judge included, without weights."""
    judge = [] if config.judge is None else [config.judge]
    return [plugins.split_weight(spec)[1] for spec in config.reward] + judge


def learned_models(config: Step3Config) -> list[str | None]:
    """The model that each `learned` score source names, the judge included; None: the reward model of the run."""
    parsed = (plugins.parse_spec(spec) for spec in source_specs(config))
    return [options.get("model") or None for name, options in parsed if name == "learned"]


def run_reward_model(config: Step3Config, table: Sequence[Role]) -> str:
    """The path of the run's reward model. A score source may read it of its context, even if nothing else needs it."""
    return inputs(table).get(REWARD_MODEL.option, str(config.reward_model))


def notes(config: Step3Config, table: Sequence[Role]) -> Iterator[str]:
    """Lines for the user: what the critic starts from, and why; without a critic, which of its options have no
    effect."""
    critic = role_of(table, CRITIC)
    if critic is None:
        rate = ("critic_learning_rate",) if config.adapter is None else ()  # an adapter has its own
        changed = {name: getattr(config, name) for name in ("critic_model", *rate)}
        names = [f"{k} {v}" for k, v in changed.items() if v != Step3Config.model_fields[k].default]
        if names:
            yield f"no effect, as {config.algorithm} has no critic: {', '.join(names)}"
    elif critic.of is not None:
        yield f"the critic is a new value head on the actor (--critic-model {SHARED})"
    else:
        new_head = ", the policy, with a new value head" if critic.start is ACTOR else ""
        yield f"the critic starts from '{critic.path}'{new_head} ({critic.reason})"


def workload(table: Sequence[Role], config: Step3Config, device: str) -> Workload:
    """The work for a plan: prompts of `max_prompt_length` and responses of `response_length` tokens."""
    tokens, predicted = config.max_prompt_length + config.response_length, config.response_length
    if config.ptx_coef or config.critic_pretraining_epochs:  # whole dialogues come between, or before, the responses
        tokens, predicted = max(tokens, config.max_length), max(predicted, config.max_length - 1)
    rollout = RolloutWork(
        rows=config.rollout_batch_size,
        prompt=config.max_prompt_length,
        response=config.response_length,
        minibatches=config.num_mini_batches,
        share=generation.options(config.rollout_backend, eos_token_id=0, pad_token_id=0).device_share(),
    )
    copies = int(config.ema_decay is not None) + int(config.keep_best is not None)
    return Workload(
        stage=STAGE.name,
        models=loaded(with_options(table, config)),
        dtype=dtype_on(config, device),
        batch=config.batch_size,
        micro_batch=config.micro_batch_size,
        shape=PassShape(config.micro_batch_size, tokens, predicted, "trained" if config.entropy_coef else "watched"),
        keep=config.keep,
        rollout=rollout,
        averages=copies,
        models_written=copies,
        eval_rows=config.eval_rows,
        note=f"evaluation: {power(min(config.eval_samples, config.max_eval_rows))}" if config.max_eval_rows else "",
    )
