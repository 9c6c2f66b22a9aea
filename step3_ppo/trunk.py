"""Step 3 on a shared trunk: policy, reference, critic and reward models are adapters on one frozen base model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf import adapters
from rlhf.config.options import FrozenOptions
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import is_adapter
from rlhf.models.adapter_files import base_of, on_base, read_options, same_method
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading, load_causal_lm, load_config
from rlhf.models.scalar import new_head, read_head
from rlhf.models.trunk import ActorCriticRole, PolicyRole, ScalarRole, Trunk
from rlhf.training.checks import check_trunk
from step3_ppo.config import POLICY, SHARED, Step3Config
from step3_ppo.resolved import Resolved, learned_models, needs_critic, reward_model_path

ACTOR, REFERENCE, CRITIC, REWARD = "policy", "reference", "critic", "reward"
"""names of the adapters; further reward models are reward-1, reward-2, ..."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The models on one trunk. No critic: the algorithm has none, or it is a head of the actor."""

    actor: PolicyRole | ActorCriticRole
    reference: PolicyRole
    critic: ScalarRole | None
    rewards: Mapping[str, ScalarRole]
    """by path"""


def open_roles(config: Step3Config, dtype: torch.dtype, vocabulary: int) -> Roles:
    """Load the base model once, and the adapters of all roles.

    The policy starts as the actor model's adapter, and the reference is a frozen copy of it. If the actor model has no
    adapter, the policy starts as a new one, and the reference is the base model alone.
    Reward models that are no adapters on the same base are left out. config: with the paths of all models
    """
    actor_path, has_critic = str(config.actor_model), needs_critic(config)
    base = base_of(actor_path)
    trunk = Trunk(load_causal_lm(base, dtype, vocabulary, Loading(config.seed, quantize=config.quantize)))
    _start_as_policy(trunk, ACTOR, config)
    if is_adapter(Path(actor_path)):
        trunk.load(REFERENCE, actor_path)
    separate_critic = has_critic and config.critic_model != SHARED
    critic = None
    if separate_critic and config.critic_model == POLICY:
        _start_as_policy(trunk, CRITIC, config)
        critic = ScalarRole(trunk, CRITIC, new_head(trunk.lm, dtype, config.seed), trained=True)
    elif separate_critic:
        critic = _scalar(trunk, CRITIC, str(config.critic_model), dtype, trained=True)
    rewards: dict[str, ScalarRole] = {}
    for path in dict.fromkeys(reward_model_path(config, model) for model in learned_models(config)):
        if on_base(path, base):
            role = f"{REWARD}-{len(rewards)}" if rewards else REWARD
            rewards[path] = _scalar(trunk, role, path, dtype, trained=False)
    actor: PolicyRole | ActorCriticRole = PolicyRole(trunk, ACTOR)
    if has_critic and not separate_critic:
        actor = ActorCriticRole(trunk, ACTOR, new_head(trunk.lm, dtype, config.seed))
    return Roles(actor, PolicyRole(trunk, REFERENCE, trained=False), critic, rewards)


def _start_as_policy(trunk: Trunk, role: str, config: Step3Config) -> None:
    start = str(config.actor_model)
    if is_adapter(Path(start)):
        trunk.load(role, start)
        return
    options = adapters.peft_options(str(config.adapter), trunk.lm.config)
    assert options is not None  # check_roles has refused it
    trunk.create(role, options)


def _scalar(trunk: Trunk, role: str, path: str, dtype: torch.dtype, trained: bool) -> ScalarRole:
    trunk.load(role, path)
    return ScalarRole(trunk, role, ScoreHead(read_head(path), dtype), trained)


def check_roles(resolved: Resolved) -> None:
    """Check that all models of the run can be adapters on one base model.

    Raises: UserError for a model of another base, or an option that only separate models support.
    """
    config = resolved.config
    if not config.share_trunk:
        return
    actor = resolve(str(config.actor_model))
    base = base_of(actor)
    check_trunk(config, base)
    _check_options(config)
    if is_adapter(Path(actor)):
        own, requested = read_options(actor), adapters.peft_options(str(config.adapter), load_config(base))
        if requested is None or not same_method(own, requested):
            raise UserError(
                f"--share-trunk: the policy continues the adapter of '{actor}', but --adapter {config.adapter} has "
                "other options; expected those with which it was trained"
            )
    for name in resolved.paths:
        path = resolve(str(getattr(config, name)))
        if name == "actor_model" or path == POLICY:
            continue
        whole = name not in resolved.planned and not is_adapter(Path(path))
        if whole or base_of(path) != base:
            got = "whole weights" if whole else f"an adapter on '{base_of(path)}'"
            raise UserError(
                f"--share-trunk: {name.replace('_', ' ')} '{path}': got {got}, expected an adapter on the policy's "
                f"base model '{base}': train it there with --share-trunk, or remove the option"
            )


def _check_options(config: Step3Config) -> None:
    own = {"reference": config.reference, "reward_models": config.reward_models}
    for name, options in own.items():
        if options != FrozenOptions():
            raise UserError(
                f"{name}: got engine options with --share-trunk, expected none: it is an adapter of the actor"
            )
    for name, trained in {"actor": config.actor, "critic": config.critic}.items():
        for option in ("gradient_checkpointing", "quantize"):
            if getattr(trained, option) not in (None, getattr(config, option)):
                raise UserError(
                    f"{name}.{option}: got its own value with --share-trunk; expected that of all roles, which are one "
                    "model"
                )
