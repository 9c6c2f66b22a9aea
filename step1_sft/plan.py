"""The workload of supervised fine-tuning, for a plan."""

import functools
from collections.abc import Mapping

from rlhf.hub.short_names import resolve
from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import ModelSpec, Workload
from rlhf.supervised.workload import supervised_workload
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer
from step1_sft import vocabulary
from step1_sft.config import STAGE, SFTConfig


def workload(config: SFTConfig, device: str, model_paths: Mapping[str, str]) -> Workload:
    """Rows of `max_length` tokens. Every token but the first may count in the loss.

    model_paths: paths of the models of earlier stages; this stage has no earlier stage
    """
    path = model_paths.get("model", config.model)
    model = ModelSpec("policy", path, "lm", config, config.adapter, ids=added_ids(config, path))
    shape = PassShape(config.micro_batch_size, config.max_length, config.max_length - 1)
    return supervised_workload(STAGE.name, config, device, model, shape)


def added_ids(config: SFTConfig, path: str) -> tuple[int, int] | None:
    """(ids of the tokenizer of the model at `path`, ids with the tokens that the options add); None if they add
    none."""
    return _ids(path, config.add_tokens, config.extend_tokenizer)


@functools.cache
def _ids(path: str, added: str | None, extended: str | None) -> tuple[int, int] | None:
    if added is None and extended is None:
        return None
    config = SFTConfig(model=path, add_tokens=added, extend_tokenizer=extended)
    return id_count(load_tokenizer(resolve(path))), id_count(vocabulary.extended_tokenizer(config, path))
