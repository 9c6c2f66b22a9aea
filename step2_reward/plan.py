"""What the reward model needs, for a plan."""

from rlhf.plan.activations import Passes
from rlhf.plan.stage import Needs, Player, dtype_on
from step2_reward.config import STAGE, RewardConfig

RANKED = (
    "counted as one pair a batch element; a ranked list of K responses has K (K - 1) / 2 pairs: that many times the "
    "micro-batches and the time, but no larger micro-batches"
)
"""A plan reads no data, so it does not know how many responses a ranked list has."""


def needs(config: RewardConfig, device: str, starts: dict[str, str]) -> Needs:
    """Pairs whose sides have `max_length` tokens. `starts` gives the places of models that earlier stages make."""
    player = Player("reward model", starts.get("model", config.model), "scalar", config, config.adapter)
    passes = Passes(2 * config.micro_batch_size, config.max_length, 0)
    batch = config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // (2 * config.max_length))
    dtype = dtype_on(config, device)
    return Needs(STAGE.name, (player,), dtype, batch, config.micro_batch_size, passes, config.keep, note=RANKED)
