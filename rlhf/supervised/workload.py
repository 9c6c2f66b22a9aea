"""The workload of a stage that learns from a data set, for a plan."""

from rlhf.plan.activations import PassShape
from rlhf.plan.forecast import ModelSpec, Workload, dtype_on
from rlhf.supervised.options import SupervisedOptions


def supervised_workload(
    stage: str, config: SupervisedOptions, device: str, model: ModelSpec, shape: PassShape
) -> Workload:
    """Of micro-batches of this shape, whose rows have one or two texts."""
    row_tokens = shape.rows // config.micro_batch_size * shape.tokens
    return Workload(
        stage=stage,
        models=(model,),
        dtype=dtype_on(config, device),
        batch=config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // row_tokens),
        micro_batch=config.micro_batch_size,
        shape=shape,
        keep=config.keep,
        averages=int(config.keep_best is not None),
        eval_rows=config.eval_rows,
    )
