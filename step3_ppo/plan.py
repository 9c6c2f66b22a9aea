"""The workload of step 3, for a plan."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf import generation
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import is_adapter
from rlhf.maths.intervals import power
from rlhf.models.adapter_files import base_of, on_base
from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import ModelSpec, RolloutWork, Workload, dtype_on, extended_ids
from rlhf.plan.sizes import tokenizer_size
from rlhf.storage.manifests import resolve_model_path
from step3_ppo.config import POLICY, REWARD, SHARED, STAGE, Step3Config
from step3_ppo.resolved import (
    choose_critic,
    critic_starts_from_reward_model,
    learned_models,
    needs_critic,
    uses_reward_model,
)


def workload(
    config: Step3Config, device: str, model_paths: Mapping[str, str], ids: Mapping[str, int] | None = None
) -> Workload:
    """Prompts of `max_prompt_length` and responses of `response_length` tokens.

    model_paths: paths of the models that the config leaves to earlier stages: `actor_model`, `reward_model`
    ids: numbers of ids of the tokenizers that earlier stages extend, by the same options
    """
    tokens, predicted = config.max_prompt_length + config.response_length, config.response_length
    if config.ptx_coef:  # whole dialogues come between the responses
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
        models=tuple(_models(config, model_paths, ids)),
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


class _Start(NamedTuple):
    """A model that this stage starts from."""

    path: str
    ids: tuple[int, int] | None = None
    """as of `ModelSpec`"""


def _critic_start(config: Step3Config, actor: _Start, reward_model: _Start) -> _Start:
    """The model whose backbone the critic has. Without their tokenizers on this machine, a reward model is expected to
    have the actor's, but for ids that step 1 adds."""
    option = config.critic_model
    start = reward_model if option in (None, REWARD) else _Start(str(option))
    if option is None and (actor.ids != reward_model.ids or not critic_starts_from_reward_model(config)):
        option = POLICY
    elif option is None and tokenizer_size(actor.path) is not None and tokenizer_size(start.path) is not None:
        paths = {"actor_model": actor.path, "critic_model": start.path}
        option = choose_critic(None, config.model_copy(update=paths))
    return actor if option == POLICY else start


def _is_on_base(model: str, base: str) -> bool:
    """Whether a reward model that exists already is an adapter on the base model."""
    try:
        return on_base(resolve_model_path(model, "model", "critic"), base)
    except UserError:  # its stage is not finished
        return False


def _models(config: Step3Config, model_paths: Mapping[str, str], ids: Mapping[str, int] | None) -> Iterator[ModelSpec]:
    def start_of(option: str, own: str | None) -> _Start:
        return _Start(own) if own else _Start(model_paths[option], extended_ids(ids, option))

    actor = start_of("actor_model", config.actor_model)
    yield ModelSpec("actor", actor.path, "lm", config.actor_options, config.adapter, ids=actor.ids)
    trunk = config.share_trunk
    adapter = config.adapter if trunk else None
    if config.adapter is None or (trunk and (config.actor_model is None or is_adapter(Path(actor.path)))):
        options = config.reference_options
        yield ModelSpec("reference", actor.path, "lm", options, adapter, on_trunk=trunk, ids=actor.ids)
    needed = uses_reward_model(config) or critic_starts_from_reward_model(config)
    reward_model = start_of("reward_model", config.reward_model) if needed else actor
    if needs_critic(config) and config.critic_model != SHARED:
        path, extended = _critic_start(config, actor, reward_model)
        yield ModelSpec("critic", path, "scalar", config.critic_options, config.adapter, on_trunk=trunk, ids=extended)
    for model in learned_models(config):
        path, extended = reward_model if model is None else _Start(model)
        on_trunk = trunk and (model is None or _is_on_base(model, base_of(resolve(actor.path))))
        options, rows = config.reward_model_options, config.rollout_batch_size
        role_adapter = adapter if on_trunk else None
        yield ModelSpec("reward model", path, "scalar", options, role_adapter, rows, on_trunk, extended)
