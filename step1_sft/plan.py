"""The workload of supervised fine-tuning, for a plan."""

from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import ModelSpec, Workload, dtype_on
from step1_sft.config import STAGE, SFTConfig


def workload(config: SFTConfig, device: str, model_paths: dict[str, str]) -> Workload:
    """Rows of `max_length` tokens. Every token but the first may count in the loss.

    model_paths: paths of the models of earlier stages; this stage has no earlier stage
    """
    model = ModelSpec("policy", model_paths.get("model", config.model), "lm", config, config.adapter)
    shape = PassShape(config.micro_batch_size, config.max_length, config.max_length - 1)
    batch = config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // config.max_length)
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
    )
