"""The models of step 3 and the algorithm: loading, engines, and their state in a checkpoint."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from data.dataset import PromptDataset
from data.prepare.encode import Demonstration
from rlhf import adapters, console, kernels, rewards
from rlhf.adapters import Adapter
from rlhf.distributed import collectives
from rlhf.engine import frozen, training
from rlhf.engine.ema import EMA
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.precision import compute_dtype
from rlhf.engine.training import Engine
from rlhf.models.load import Loading, load_causal_lm
from rlhf.models.policy import ActorCritic, Policy
from rlhf.models.scalar import HEAD, ScalarModel, load_scalar_model, new_head, new_scalar_model
from rlhf.text.encoder import id_count
from step3_ppo import algorithms
from step3_ppo.config import POLICY, SHARED, Step3Config
from step3_ppo.inputs import open_backend
from step3_ppo.kl import KLController, KLOptions
from step3_ppo.learner import Learner
from step3_ppo.ptx import Ptx, describe_ptx
from step3_ppo.rollout import Reference, Scorer, ScoreScaling
from step3_ppo.schedule import iterations
from step3_ppo.trunk import open_roles


def set_up(
    config: Step3Config, tokenizer: PreTrainedTokenizerBase, ptx_rows: PromptDataset[Demonstration] | None
) -> Learner:
    """Load every model and build the engines. config: with the paths of all models; ptx_rows: of PPO-ptx"""
    if config.torch_compile and config.rescore:
        kernels.round_like_eager()  # otherwise the first ratio is not 1 and the first KL is not 0
    context = reward_context(config, tokenizer)
    algorithm, ids = algorithms.load(config), id_count(tokenizer)
    has_critic, roles = algorithm.value_loss is not None, None
    if config.share_trunk:
        roles = open_roles(config, context.dtype, ids)
        context = replace(context, loaded=roles.rewards)
    steps_per_iteration = config.num_ppo_epochs * config.num_mini_batches
    critic_steps = iterations(config) * steps_per_iteration
    actor_steps = critic_steps - config.critic_warmup_iterations * steps_per_iteration
    shares_actor = has_critic and config.critic_model == SHARED
    policy = _policy(config, context, ids, shares_actor) if roles is None else roles.actor
    rates = {HEAD: config.critic_learning_rate} if shares_actor else {}
    actor = Engine(policy, config.actor_options, critic_steps if shares_actor else actor_steps, "actor", rates)
    reference: FrozenEngine | Adapter
    if roles is None:
        reference = _reference(config, context, ids)
    else:
        reference = FrozenEngine(roles.reference, config.reference_options, context.dtype)
    critic: Engine | None = actor if shares_actor else None
    if has_critic and not shares_actor:
        value_model = (None if roles is None else roles.critic) or _value_model(config, context, ids)
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


def _policy(config: Step3Config, context: rewards.Context, vocabulary: int, has_critic: bool) -> Policy:
    options = config.actor_options
    loading = Loading(config.seed, training.shards_of(options), options.quantize)
    lm = load_causal_lm(str(config.actor_model), context.dtype, vocabulary, loading)
    adapters.wrap(lm, config.adapter)
    return ActorCritic(lm, new_head(lm, context.dtype, config.seed)) if has_critic else Policy(lm)


def _reference(config: Step3Config, context: rewards.Context, vocabulary: int) -> FrozenEngine | Adapter:
    if config.adapter is not None:
        return adapters.open_adapter(config.adapter)
    shards = frozen.shards_of(config.reference_options, context.dtype)
    lm = load_causal_lm(str(config.actor_model), context.dtype, vocabulary, Loading(config.seed, shards))
    return FrozenEngine(Policy(lm), config.reference_options, context.dtype)


def _value_model(config: Step3Config, context: rewards.Context, vocabulary: int) -> ScalarModel:
    options = config.critic_options
    loading = Loading(config.seed, training.shards_of(options), options.quantize)
    if config.critic_model == POLICY:
        model = new_scalar_model(str(config.actor_model), context.dtype, vocabulary, loading)
    else:
        model = load_scalar_model(str(config.critic_model), context.dtype, vocabulary, loading)
    model.backbone = adapters.wrap(model.backbone, config.adapter)
    return model


def reward_context(config: Step3Config, tokenizer: PreTrainedTokenizerBase) -> rewards.Context:
    """The context with which the score sources and the judge of this run are opened."""
    device = collectives.local_device()
    return rewards.Context(
        tokenizer=tokenizer,
        device=device,
        dtype=compute_dtype(config, device),
        reward_model=str(config.reward_model),
        micro_batch_size=config.rollout_batch_size,
        model_options=config.reward_model_options,
    )
