"""Checks before ranks split a model (tensor parallel) or the tokens of its rows (sequence parallel)."""

from transformers import PretrainedConfig

from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.models.load import load_config

TENSOR = ("gemma2", "gpt_neo", "gpt_neox", "gptj", "llama", "mistral", "opt", "qwen2", "qwen3")
"""Model types that train the same when DeepSpeed 0.19 splits them, as measured; gpt2, bloom and mixtral fail."""
SEQUENCE = ("gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")
"""Model types that train the same when ranks split the tokens. Windows and ALiBi need masks; gptj has its own
attention."""
HEADS = ("num_attention_heads", "num_key_value_heads")


def replicas(options: EngineOptions, ranks: int) -> int:
    """How many copies of the model `ranks` processes hold, each of which gets a part of the rows.

    Raises: UserError for options that exclude each other, or a number of ranks that is not divisible.
    """
    tensor, sequence = options.tensor_parallel_size, options.sequence_parallel_size
    if tensor > 1 and sequence > 1:
        raise UserError(
            f"--tensor-parallel-size {tensor} --sequence-parallel-size {sequence}: expected one of them, the other 1"
        )
    if tensor > 1 and options.adapter is not None:
        raise UserError(
            f"--tensor-parallel-size {tensor}: got it with --adapter {options.adapter}, expected to train all weights: "
            "DeepSpeed cannot split adapters; remove one of the two, or shard with --zero-stage 3"
        )
    for name, size in (("tensor", tensor), ("sequence", sequence)):
        if ranks % size:
            raise UserError(f"--{name}-parallel-size {size}: got {ranks} processes, expected a multiple of {size}")
    return ranks // (tensor * sequence)


def check_split(options: EngineOptions, path: str) -> None:
    """Raises: UserError if the model at `path` cannot be split as the options require."""
    for name, size, types in (
        ("tensor", options.tensor_parallel_size, TENSOR),
        ("sequence", options.sequence_parallel_size, SEQUENCE),
    ):
        if size > 1:
            _check(f"--{name}-parallel-size {size}: model '{path}'", name, size, types, path)


def _check(subject: str, name: str, size: int, types: tuple[str, ...], path: str) -> None:
    config = load_config(path)
    if config.model_type not in types:
        raise UserError(f"{subject} is a {config.model_type}, expected one of {', '.join(types)}; use --zero-stage 3")
    if name == "sequence" and _has_window(config):
        raise UserError(
            f"{subject} attends within a window of {config.sliding_window} tokens, expected attention to all"
        )
    for heads in HEADS:
        count = getattr(config, heads, None)
        if count is not None and count % size:
            raise UserError(f"{subject} has {heads} {count}, expected a multiple of {size}")


def _has_window(config: PretrainedConfig) -> bool:
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
