"""A DeepSpeed JSON of the user: what it sets of our options, and what only DeepSpeed knows. Torch-free.

Every value of the file is used or refused. "auto" leaves a value to this project. A section with `enabled: false`
counts as absent.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.config.plain_values import from_json
from rlhf.config.record import Tree
from rlhf.errors import UserError


class Setting(NamedTuple):
    """The value of one of our options, and where it comes from."""

    value: Any
    source: str


Settings = Mapping[str, Setting]
"""by option, as `zero_stage`"""
STEP_ROWS = "train_batch_size"
"""the key with the rows of one optimizer step, over all devices"""
ACCUMULATION = "gradient_accumulation_steps"
OPTIONS = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "max_grad_norm",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.nvme_path": "offload_nvme",
    "zero_optimization.offload_param.nvme_path": "offload_nvme",
    "tensor_parallel.autotp_size": "tensor_parallel_size",
    "sequence_parallel_size": "sequence_parallel_size",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
"""our option for each key whose value means the same"""
OFFLOAD = {
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_param.device": "offload_param",
}
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw"}
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
FIXED: dict[str, tuple[tuple[object, ...], str]] = {
    "optimizer.params.adam_w_mode": ((True,), "weight decay is AdamW's here"),
    "optimizer.params.torch_adam": ((True, False), "AdamW is torch's here"),
    "optimizer.params.bias_correction": ((True,), "AdamW corrects its bias here"),
    "scheduler.params.warmup_min_lr": ((0,), "the learning rate rises from 0"),
    "scheduler.params.warmup_type": (("linear",), "the learning rate rises linearly"),
    "communication_data_type": (("fp32",), "gradients are summed in fp32"),
    "data_types.grad_accum_dtype": (("fp32",), "gradients are summed in fp32"),
    "fp16.loss_scale": ((0,), "the loss scale is dynamic"),
    "fp16.auto_cast": ((False,), "the whole model has one dtype"),
    "prescale_gradients": ((False,), "the loss has the scale of the whole step"),
    "gradient_predivide_factor": ((1,), "the loss has the scale of the whole step"),
    "sparse_gradients": ((False,), "gradients are dense"),
    "zero_allow_untested_optimizer": ((True,), "the engine brings its own AdamW"),
    "zero_force_ds_cpu_optimizer": ((False,), "the engine brings its own AdamW"),
    "tensor_parallel.vocab_parallel_lm_head": ((False,), "log-probs need the whole vocabulary"),
}
"""keys with a value that the engine depends on, and the reason"""
PASSED = frozenset(
    {
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"),
        *("fp16.loss_scale_window", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.min_loss_scale"),
        "fp16.consecutive_hysteresis",
        *(
            f"zero_optimization.{name}"
            for name in (
                *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter"),
                *("reduce_bucket_size", "contiguous_gradients", "round_robin_gradients", "sub_group_size"),
                *("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
                *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
                *("stage3_gather_16bit_weights_on_model_save", "memory_efficient_linear", "zero_hpz_partition_size"),
                *("offload_optimizer.pin_memory", "offload_optimizer.buffer_count", "offload_optimizer.fast_init"),
                *("offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write"),
                *("offload_param.pin_memory", "offload_param.buffer_count", "offload_param.buffer_size"),
                "offload_param.max_in_cpu",
            )
        ),
    }
)
"""keys that change speed, memory or logs of DeepSpeed, but no result"""
PASSED_SECTIONS = ("aio", "comms_logger", "flops_profiler")
CURES = {
    "activation_checkpointing": "use --gradient-checkpointing",
    "tensorboard": "use --report-to tensorboard",
    "wandb": "use --report-to wandb",
    "comet": "use --report-to comet_ml",
    "csv_monitor": "OUT/STAGE/metrics.jsonl has every number",
    "hybrid_engine": "remove it: a rollout gathers the weights once, without the hybrid engine",
    "pipeline": "there is no pipeline parallelism here; use --zero-stage 3, --tensor-parallel-size or "
    "--sequence-parallel-size",
    "checkpoint": "checkpoints are this project's own; see --save-every",
    "amp": "use --dtype",
    "optimizer": 'write "auto", and use --optim',
    "scheduler": 'write "auto", and use --lr-scheduler-type, and --warmup-steps or --warmup-ratio',
}
"""by section that this project does not pass on"""


def read(path: str | Path) -> Tree:
    """The values of a DeepSpeed JSON by dotted key, without "auto" and sections that are off. Raises: UserError."""
    try:
        tree = from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--deepspeed-config {path}: cannot be read ({error.strerror}); expected a JSON file") from None
    except ValueError as error:
        raise UserError(f"--deepspeed-config {path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"--deepspeed-config {path}: got a {type(tree).__name__}, expected a JSON object")
    return {key.replace("bfloat16.", "bf16."): value for key, value in _leaves(tree) if value != "auto"}


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if not isinstance(value, dict):
            yield key, value
        elif value.get("enabled") is False and key not in ("bf16", "bfloat16", "fp16"):
            continue
        else:
            yield from _leaves(value, f"{key}.")


def settings(path: str) -> Settings:
    """The options that the file sets. `batch_size` is the rows of an optimizer step. Raises: UserError for a key that
    this project cannot follow, or two keys that contradict each other."""
    values = read(path)
    result: dict[str, Setting] = {}
    for key, value in values.items():
        source = f"{path}: {key} {json.dumps(value)}"
        for option, converted in _options_of(key, value, source):
            _add(result, option, Setting(converted, source))
    dtypes = {name: values.get(f"{name}.enabled") for name in ("bf16", "fp16")}
    if all(dtypes.values()):
        raise UserError(f"{path}: bf16.enabled true and fp16.enabled true: expected one of them")
    for name, enabled in dtypes.items():
        if enabled or (dtypes["bf16"] is False and not dtypes["fp16"]):
            _add(result, "dtype", Setting(name if enabled else "fp32", f"{path}: {name}.enabled {json.dumps(enabled)}"))
            break
    return result


def _add(result: dict[str, Setting], option: str, setting: Setting) -> None:
    other = result.setdefault(option, setting)
    if other.value != setting.value:
        raise UserError(f"{other.source} and {setting.source}: expected one value of --{option.replace('_', '-')}")


def _options_of(key: str, value: object, source: str) -> Iterator[tuple[str, object]]:
    """(option, value) of each option that a key sets. Raises: UserError if the key is not supported."""
    section = key.partition(".")[0]
    if key in OPTIONS:
        yield OPTIONS[key], value
    elif key == STEP_ROWS:
        yield "batch_size", value
    elif key in OFFLOAD:
        if value not in ("none", "cpu", "nvme", None):
            raise UserError(f"{source}: expected none, cpu or nvme")
        yield OFFLOAD[key], value in ("cpu", "nvme")
    elif key == "optimizer.params.betas":
        if not isinstance(value, list) or len(value) != 2:
            raise UserError(f"{source}: expected two numbers, such as [0.9, 0.95]")
        betas = zip(("adam_beta1", "adam_beta2"), value, strict=True)
        yield from ((option, beta) for option, beta in betas if beta != "auto")
    elif key == "optimizer.type" and value in OPTIMIZERS:
        yield "optim", OPTIMIZERS[value]
    elif key == "scheduler.type" and value in SCHEDULES:
        yield "lr_scheduler_type", SCHEDULES[value]
    elif key in FIXED:
        allowed, reason = FIXED[key]
        if value not in allowed:
            shown = " or ".join(json.dumps(one) for one in allowed)
            raise UserError(f'{source}: {reason}; expected {shown} or "auto"')
    elif not (key in PASSED or section in PASSED_SECTIONS or key in (ACCUMULATION, "bf16.enabled", "fp16.enabled")):
        raise UserError(f"{source}: not supported; {CURES.get(section, 'remove it')}")


def passed_on(path: str | None, offloaded: Iterable[str] = ()) -> Tree:
    """The part of the file that only DeepSpeed knows, as a tree: bucket sizes, overlap, logs.

    offloaded: the sections of offloading that are in use (`offload_optimizer`); keys of the others mean nothing
    """
    tree: Tree = {}
    for key, value in read(path).items() if path else ():
        *sections, name = key.split(".")
        unused = sections[1:] and sections[1].startswith("offload_") and sections[1] not in offloaded
        if unused or not (key in PASSED or key.partition(".")[0] in PASSED_SECTIONS):
            continue
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree
