"""The models of step 3 and the algorithm: loading, engines, and their state in a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from data.dataset import PromptDataset
from data.prepare.encode import Demonstration
from rlhf import adapters, console, kernels, rewards
from rlhf.adapters import Adapter
from rlhf.config.options import TrainingOptions
from rlhf.distributed import collectives
from rlhf.engine import frozen, training
from rlhf.engine.ema import EMA
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.precision import compute_dtype
from rlhf.engine.training import Engine
from rlhf.hub.untrusted import is_adapter
from rlhf.models.adapter_files import base_of
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading, load_causal_lm
from rlhf.models.policy import ActorCritic, Policy
from rlhf.models.scalar import HEAD, ScalarModel, load_scalar_model, new_head, new_scalar_model, read_head
from rlhf.models.trunk import ActorCriticRole, PolicyRole, ScalarRole, Trunk
from rlhf.roles import Role, role_of
from rlhf.text.encoder import id_count
from step3_ppo import algorithms
from step3_ppo.config import STAGE, Step3Config
from step3_ppo.inputs import open_backend
from step3_ppo.kl import KLController, KLOptions
from step3_ppo.learner import Learner
from step3_ppo.ptx import Ptx, describe_ptx
from step3_ppo.roles import ACTOR, CRITIC, REFERENCE, REWARD_MODEL, run_reward_model
from step3_ppo.rollout import Reference, Scorer, ScoreScaling
from step3_ppo.schedule import iterations


@dataclass(frozen=True, slots=True)
class OnTrunk:
    """The models on one base model. No critic: the algorithm has none, or it is a head of the actor."""

    actor: PolicyRole | ActorCriticRole
    reference: PolicyRole
    critic: ScalarRole | None
    rewards: Mapping[str, ScalarRole]
    """by path"""


def set_up(
    config: Step3Config,
    table: Sequence[Role],
    tokenizer: PreTrainedTokenizerBase,
    ptx_rows: PromptDataset[Demonstration] | None,
) -> Learner:
    """Load every model of the table and build the engines. ptx_rows: of PPO-ptx"""
    if config.torch_compile and config.rescore:
        kernels.round_like_eager()  # otherwise the first ratio is not 1 and the first KL is not 0
    policy_role, reference_role, *_ = table
    critic_role = role_of(table, CRITIC)
    context = reward_context(config, table, tokenizer)
    algorithm, ids, on_trunk = algorithms.load(config), id_count(tokenizer), None
    if config.share_trunk:
        on_trunk = open_trunk(config, table, context.dtype, ids)
        context = replace(context, loaded=on_trunk.rewards)
    steps_per_iteration = config.num_ppo_epochs * config.num_mini_batches
    critic_steps = iterations(config) * steps_per_iteration
    actor_steps = critic_steps - config.critic_warmup_iterations * steps_per_iteration
    shares_actor = critic_role is not None and critic_role.of is not None
    policy = _policy(config, policy_role, context, ids, shares_actor) if on_trunk is None else on_trunk.actor
    rates = {HEAD: config.critic_learning_rate} if shares_actor else {}
    actor = Engine(policy, config.actor_options, critic_steps if shares_actor else actor_steps, "actor", rates)
    reference: FrozenEngine | Adapter
    if on_trunk is None:
        reference = _reference(config, reference_role, context, ids)
    else:
        reference = FrozenEngine(on_trunk.reference, config.reference_options, context.dtype)
    critic: Engine | None = actor if shares_actor else None
    if critic_role is not None and not shares_actor:
        value_model = (None if on_trunk is None else on_trunk.critic) or _value_model(config, critic_role, context, ids)
        critic = Engine(value_model, config.critic_options, critic_steps, "critic")
    scorer = Scorer(
        reference=Reference(reference),
        sources=rewards.open_sources(config.reward, context, config.reward_combine, config.uncertainty_coef),
        tokenizer=tokenizer,
        sampling=config,
        batch_size=config.eval_rows,
        missing_eos_penalty=config.missing_eos_penalty,
        rescore=config.rescore,
    )
    if ptx_rows is not None:
        console.say(describe_ptx(config, ptx_rows))
    return Learner(
        config=config,
        actor=actor,
        critic=critic,
        scorer=scorer,
        algorithm=algorithm,
        kl=KLController(config if isinstance(config, KLOptions) else None),
        backend=open_backend(config, tokenizer.eos_token_id, tokenizer.pad_token_id),
        scaling=ScoreScaling(config),
        ptx=None if ptx_rows is None else Ptx(ptx_rows, config, config.seed, tokenizer.pad_token_id),
        ema=None if config.ema_decay is None else EMA(actor, config.ema_decay),
        context=context,
    )


def _policy(config: Step3Config, role: Role, context: rewards.Context, vocabulary: int, has_critic: bool) -> Policy:
    lm = load_causal_lm(role.path, context.dtype, vocabulary, _loading(config, role))
    adapters.wrap(lm, role.adapter)
    return ActorCritic(lm, new_head(lm, context.dtype, config.seed)) if has_critic else Policy(lm)


def _reference(config: Step3Config, role: Role, context: rewards.Context, vocabulary: int) -> FrozenEngine | Adapter:
    if role.of is not None:
        return adapters.open_adapter(str(config.adapter))
    shards = frozen.shards_of(config.reference_options, context.dtype)
    lm = load_causal_lm(role.path, context.dtype, vocabulary, Loading(config.seed, shards))
    return FrozenEngine(Policy(lm), config.reference_options, context.dtype)


def _value_model(config: Step3Config, role: Role, context: rewards.Context, vocabulary: int) -> ScalarModel:
    load = new_scalar_model if role.start is ACTOR else load_scalar_model
    model = load(role.path, context.dtype, vocabulary, _loading(config, role))
    model.backbone = adapters.wrap(model.backbone, role.adapter)
    return model


def _loading(config: Step3Config, role: Role) -> Loading:
    """Shards and bits of a trained model; a compiler that is chosen after the table was made changes neither."""
    assert isinstance(role.options, TrainingOptions)
    return Loading(config.seed, training.shards_of(role.options), role.options.quantize)


def open_trunk(config: Step3Config, table: Sequence[Role], dtype: torch.dtype, vocabulary: int) -> OnTrunk:
    """Load the base model once, and the adapters of all roles.

    The policy starts as the actor model's adapter, and the reference is a frozen copy of it. If the actor model has no
    adapter, the policy starts as a new one, and the reference is the base model alone.
    """
    actor, reference, *_ = table
    trunk = Trunk(
        load_causal_lm(base_of(actor.path), dtype, vocabulary, Loading(config.seed, quantize=config.quantize))
    )
    _start_as_policy(trunk, actor)
    if reference.of is None:
        trunk.load(REFERENCE.on_trunk_as, reference.path)
    critic, critic_role = None, role_of(table, CRITIC)
    if critic_role is not None and critic_role.of is None:
        if critic_role.start is ACTOR:
            _start_as_policy(trunk, critic_role)
            critic = ScalarRole(trunk, CRITIC.on_trunk_as, new_head(trunk.lm, dtype, config.seed), trained=True)
        else:
            critic = _scalar(trunk, critic_role, CRITIC.on_trunk_as, dtype)
    scorers: dict[str, ScalarRole] = {}
    for role in table:
        if role.part is REWARD_MODEL and role.on_trunk and role.path not in scorers:
            name = f"{REWARD_MODEL.on_trunk_as}-{len(scorers)}" if scorers else REWARD_MODEL.on_trunk_as
            scorers[role.path] = _scalar(trunk, role, name, dtype)
    policy: PolicyRole | ActorCriticRole = PolicyRole(trunk, ACTOR.on_trunk_as)
    if critic_role is not None and critic is None:
        policy = ActorCriticRole(trunk, ACTOR.on_trunk_as, new_head(trunk.lm, dtype, config.seed))
    return OnTrunk(policy, PolicyRole(trunk, REFERENCE.on_trunk_as, trained=False), critic, scorers)


def _start_as_policy(trunk: Trunk, role: Role) -> None:
    if is_adapter(Path(role.path)):
        trunk.load(role.part.on_trunk_as, role.path)
        return
    options = adapters.peft_options(str(role.adapter), trunk.lm.config)
    assert options is not None  # check_trunk has refused it
    trunk.create(role.part.on_trunk_as, options)


def _scalar(trunk: Trunk, role: Role, name: str, dtype: torch.dtype) -> ScalarRole:
    trunk.load(name, role.path)
    return ScalarRole(trunk, name, ScoreHead(read_head(role.path), dtype), role.trained)


def reward_context(config: Step3Config, table: Sequence[Role], tokenizer: PreTrainedTokenizerBase) -> rewards.Context:
    """The context with which the score sources and the judge of this run are opened."""
    device = collectives.local_device()
    return rewards.Context(
        tokenizer=tokenizer,
        device=device,
        dtype=compute_dtype(config, device),
        reward_model=run_reward_model(config, table),
        micro_batch_size=config.rollout_batch_size,
        model_options=config.reward_model_options,
        answers=Path(config.output_dir) / STAGE.name / rewards.ANSWERS,
    )
