"""What supervised fine-tuning needs, for a plan."""

from rlhf.plan.activations import Passes
from rlhf.plan.stage import Needs, Player, dtype_on
from step1_sft.config import STAGE, SFTConfig


def needs(config: SFTConfig, device: str, starts: dict[str, str]) -> Needs:
    """Rows of `max_length`, of which everything but the first token may be learned. `starts` gives places of models
    that the config leaves to earlier stages: there are none before this one."""
    player = Player("policy", starts.get("model", config.model), "lm", config, config.adapter)
    passes = Passes(config.micro_batch_size, config.max_length, config.max_length - 1)
    batch = config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // config.max_length)
    dtype = dtype_on(config, device)
    return Needs(STAGE.name, (player,), dtype, batch, config.micro_batch_size, passes, config.keep)
