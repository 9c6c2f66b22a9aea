"""Export of an engine's adapter, and of a scalar model's head, as a directory that peft can load."""

import contextlib
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.distributed import collectives
from rlhf.engine.ema import EMA
from rlhf.engine.export import save_left_padded, save_scalar_config, set_special_ids
from rlhf.engine.training import Engine
from rlhf.models import adapter_files
from rlhf.models.adapter_files import ONLY
from rlhf.models.policy import ActorCritic, Policy
from rlhf.models.scalar import ScalarModel, ScoreStatistics
from rlhf.models.trunk import Role


def save_policy_adapter(
    engine: Engine, base: str, tokenizer: PreTrainedTokenizerBase, directory: Path, average: EMA | None = None
) -> None:
    """Write the adapter of a Policy engine, with tokenizer, template and configs. Its weights are not sharded.

    base: path or hub id of the model without the adapter. With `average`, the averaged weights are written.
    """
    policy = engine.module
    assert isinstance(policy, Policy)
    with average.inside(policy) if average is not None else contextlib.nullcontext():
        if collectives.is_main():
            set_special_ids(policy.lm, tokenizer)
            policy.lm.config.save_pretrained(directory)
            policy.lm.generation_config.save_pretrained(directory)
            save_left_padded(tokenizer, directory)
            adapter_files.save(*_adapter(policy, policy.lm), base, directory)
    collectives.barrier()


def save_scalar_adapter(
    engine: Engine,
    base: str,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    scores: ScoreStatistics | None = None,
) -> None:
    """The same of a ScalarModel engine, or of the critic of an ActorCritic, with its head in fp32."""
    model = engine.module.critic() if isinstance(engine.module, ActorCritic) else engine.module
    assert isinstance(model, ScalarModel)
    if collectives.is_main():
        save_scalar_config(model, tokenizer, directory, scores)
        lm, name = _adapter(engine.module, model.backbone)
        adapter_files.save(lm, name, base, directory, model.score.exact)
    collectives.barrier()


def _adapter(model: object, whole: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """The model that has the adapter of an engine's model, and the adapter's name."""
    return (model.trunk.lm, model.role) if isinstance(model, Role) else (whole, ONLY)
