"""The workload of a stage that learns from a data set, for a plan."""

from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import ModelSpec, Workload, dtype_on
from rlhf.supervised.options import SupervisedOptions


def supervised_workload(
    stage: str, config: SupervisedOptions, device: str, model: ModelSpec, sides: int, predicted: int, note: str = ""
) -> Workload:
    """Rows of `sides` texts with `max_length` tokens each.

    predicted: tokens of a text that the head of a language model predicts. note: as of `Workload`
    """
    row_tokens = sides * config.max_length
    batch = config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // row_tokens)
    return Workload(
        stage,
        (model,),
        dtype_on(config, device),
        batch,
        config.micro_batch_size,
        PassShape(sides * config.micro_batch_size, config.max_length, predicted),
        config.keep,
        averages=int(config.keep_best is not None),
        copied=config.async_checkpoints,
        eval_rows=config.eval_rows,
        note=note,
    )
