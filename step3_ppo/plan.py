"""What step 3 needs, for a plan."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf import generation, plugins, rewards
from rlhf.plan.activations import Passes
from rlhf.plan.stage import Needs, Player, Rollout, dtype_on
from step3_ppo import algorithms
from step3_ppo.config import MAKERS, STAGE, Step3Config


def needs_critic(config: Step3Config) -> bool:
    """Whether the algorithm trains a critic."""
    return algorithms.load(config).value_loss is not None


def needs(config: Step3Config, device: str, starts: dict[str, str]) -> Needs:
    """Prompts of `max_prompt_length` and responses of `response_length`. `starts` gives the places of the models that
    the config leaves to earlier stages: `actor_model`, `reward_model`."""
    tokens, predicted = config.max_prompt_length + config.response_length, config.response_length
    if config.ptx_coef:  # whole dialogues come between the responses
        tokens, predicted = max(tokens, config.max_length), max(predicted, config.max_length - 1)
    rollout = Rollout(
        config.rollout_batch_size,
        config.max_prompt_length,
        config.response_length,
        config.num_ppo_epochs,
        config.num_mini_batches,
        generation.options(config.rollout_backend, eos_token_id=0, pad_token_id=0).device_share(),
    )
    return Needs(
        STAGE.name,
        tuple(_players(config, starts)),
        dtype_on(config, device),
        config.batch_size,
        config.micro_batch_size,
        Passes(config.micro_batch_size, tokens, predicted, entropy=True),
        config.keep,
        rollout,
        averages=int(config.ema_decay is not None),
        models_written=int(config.ema_decay is not None) + int(config.keep_best is not None),
    )


def starts(output_dir: str, planned: Mapping[str, str]) -> dict[str, str]:
    """The models that earlier stages leave to this one: theirs where they are made, else `planned`, the models that
    those stages will start from."""
    made = {name: Path(output_dir) / maker / "model" for name, maker in MAKERS.items()}
    return {**planned, **{name: str(model) for name, model in made.items() if (model / "config.json").is_file()}}


def _players(config: Step3Config, starts: dict[str, str]) -> Iterator[Player]:
    actor, critic = config.actor.over(config), config.critic.over(config)
    start = config.actor_model or starts["actor_model"]
    yield Player("actor", start, "lm", actor, config.adapter)
    if config.adapter is None:
        yield Player("reference", start, "lm", config.reference.beside(actor))
    reward_model = config.reward_model or starts["reward_model"]
    if needs_critic(config):
        yield Player("critic", config.critic_model or reward_model, "scalar", critic, config.adapter)
    judge = [] if config.judge is None else [config.judge]
    for spec in [*(rewards.split_weight(spec)[1] for spec in config.reward), *judge]:
        name, options = plugins.parse_spec(spec)
        if name == "learned":
            held = config.reward_models.beside(critic)
            place = options.get("model") or reward_model
            yield Player("reward model", place, "scalar", held, asked_at_once=config.rollout_batch_size)
