"""The workload of reward-model training, for a plan."""

from collections.abc import Mapping
from dataclasses import replace

from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import ModelSpec, Workload, extended_ids
from rlhf.supervised.workload import supervised_workload
from step2_reward.config import STAGE, RewardConfig

RANKED = "one pair a row is assumed; a ranked list of K responses is K (K - 1) / 2 pairs, so many times as long"
"""A plan reads no data, so it does not know how many responses a ranked list has."""


def workload(
    config: RewardConfig, device: str, model_paths: Mapping[str, str], ids: Mapping[str, int] | None = None
) -> Workload:
    """Pairs whose sides have `max_length` tokens.

    model_paths: paths of the models of earlier stages
    ids: numbers of ids of the tokenizers that earlier stages extend, by option of the chain
    """
    path, extended = model_paths.get("model", config.model), extended_ids(ids, "reward_model")
    model = ModelSpec("reward model", path, "scalar", config, config.adapter, ids=extended)
    shape = PassShape(2 * config.micro_batch_size, config.max_length, 0)
    return replace(supervised_workload(STAGE.name, config, device, model, shape), note=RANKED)
