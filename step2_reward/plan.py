"""The workload of reward-model training, for a plan."""

from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import ModelSpec, Workload, dtype_on
from step2_reward.config import STAGE, RewardConfig

RANKED = (
    "one pair per batch element is assumed; a ranked list of K responses has K (K - 1) / 2 pairs, which needs that "
    "many times the micro-batches and the time, but no larger micro-batches"
)
"""A plan reads no data, so it does not know how many responses a ranked list has."""


def workload(config: RewardConfig, device: str, model_paths: dict[str, str]) -> Workload:
    """Pairs whose sides have `max_length` tokens. model_paths: paths of the models of earlier stages"""
    model = ModelSpec("reward model", model_paths.get("model", config.model), "scalar", config, config.adapter)
    shape = PassShape(2 * config.micro_batch_size, config.max_length, 0)
    batch = config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // (2 * config.max_length))
    return Workload(
        STAGE.name,
        (model,),
        dtype_on(config, device),
        batch,
        config.micro_batch_size,
        shape,
        config.keep,
        averages=int(config.keep_best is not None),
        copied=config.async_checkpoints,
        note=RANKED,
    )
