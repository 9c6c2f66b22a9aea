"""A DeepSpeed JSON of the user: what it sets of our options, and what only DeepSpeed knows. Torch-free.

Every value of the file is used or refused. "auto" leaves a value to this project. A section with `enabled: false`
counts as absent.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rlhf.config.record import Config, Tree
from rlhf.errors import UserError

CONFIG = "deepspeed-config"
"""the option that names the file"""
STEP_ROWS = "train_batch_size"
"""the key with the rows of one optimizer step, over all devices"""
ACCUMULATION = "gradient_accumulation_steps"
OPTIONS = {
    STEP_ROWS: "batch_size",
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
DEVICES = {"none": False, "cpu": True, "nvme": True}
WORDS: dict[str, tuple[str, Mapping[str, object]]] = {
    "zero_optimization.offload_optimizer.device": ("offload_optimizer", DEVICES),
    "zero_optimization.offload_param.device": ("offload_param", DEVICES),
    "optimizer.type": ("optim", {"AdamW": "adamw", "Adam": "adamw"}),
    "scheduler.type": (
        "lr_scheduler_type",
        {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"},
    ),
}
"""our option for each key with other words, and its value for each of them"""
BETAS = "optimizer.params.betas"
FIXED: Mapping[str, object] = {
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.bias_correction": True,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_type": "linear",
    "communication_data_type": "fp32",
    "data_types.grad_accum_dtype": "fp32",
    "fp16.loss_scale": 0,
    "fp16.auto_cast": False,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1,
    "sparse_gradients": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "tensor_parallel.vocab_parallel_lm_head": False,
}
"""keys with the value that the engine has; with another one, numbers would be wrong"""
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
READ = {ACCUMULATION, "bf16.enabled", "fp16.enabled", "optimizer.params.torch_adam"}
"""keys that are used in another way, or change nothing: AdamW is torch's"""
PASSED_SECTIONS = ("aio", "comms_logger", "flops_profiler")


def plain_words(words: Sequence[str]) -> list[str]:
    """A command line as DeepSpeed's tutorials write it, in the words of this project.

    `--local_rank N`, which the deepspeed launcher adds, is dropped; `--deepspeed` alone too, because every stage runs
    under DeepSpeed; `--deepspeed FILE`, as transformers writes it, is `--deepspeed-config FILE`.
    """
    return list(_plain_words(list(words)))


def _plain_words(words: list[str]) -> Iterator[str]:
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        follows = bool(words) and not words[0].startswith("-")
        if name == "--local-rank":
            if not equals and words and re.fullmatch(r"-?\d+", words[0]):
                del words[0]
        elif name == "--deepspeed":
            if equals or follows:
                yield f"--{CONFIG}={value if equals else words.pop(0)}"
        elif name == "--num-accelerators":
            yield f"--num-gpus{equals}{value}"
        else:
            yield word


def read(path: str | Path) -> Tree:
    """The values of a DeepSpeed JSON by dotted key, without "auto" and sections that are off. Raises: UserError."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--deepspeed-config {path}: cannot be read ({error.strerror}); expected a JSON file") from None
    except ValueError as error:
        raise UserError(f"--deepspeed-config {path}: not valid JSON: {error}") from None
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


def options(path: str, cls: type[Config]) -> Tree:
    """The options of `cls` that the file sets; none without a path. `batch_size` is the rows of an optimizer step.
    Raises: UserError for a key that this project cannot follow, or two keys that contradict each other."""
    result: Tree = {}
    for option, value in _options(path, read(path)) if path else ():
        if result.setdefault(option, value) != value:
            name = option.replace("_", "-")
            raise UserError(f"{path}: it sets --{name} to {result[option]} and to {value}; expected one value")
    if getattr(cls, "STEP_ROWS", None) != "batch_size":
        result.pop("batch_size", None)
    return {name: value for name, value in result.items() if name in cls.model_fields}


def _options(path: str, values: Tree) -> Iterator[tuple[str, object]]:
    """(option, value) of each option that the values of a file set. Raises: UserError if a key is not supported."""
    for key, value in values.items():
        if key in OPTIONS:
            yield OPTIONS[key], value
        elif key in WORDS and value in WORDS[key][1]:
            option, words = WORDS[key]
            yield option, words[value]
        elif key == BETAS:
            betas = zip(("adam_beta1", "adam_beta2"), value, strict=True)
            yield from ((option, beta) for option, beta in betas if beta != "auto")
        elif not (_is_passed(key) or key in READ or (key in FIXED and value == FIXED[key])):
            expected = f"expected {json.dumps(FIXED[key])}" if key in FIXED else "remove it, or use an option here"
            raise UserError(f'{path}: {key} {json.dumps(value)}: not supported; {expected}, or write "auto"')
    for name in ("bf16", "fp16"):
        if values.get(f"{name}.enabled"):
            yield "dtype", name
    if values.get("bf16.enabled") is False and not values.get("fp16.enabled"):
        yield "dtype", "fp32"


def require_agreement(path: str, config: Config, section: str = "") -> None:
    """Raises: UserError if an option has another value than the file sets: the user wrote both."""
    for name, value in options(path, type(config)).items():
        if getattr(config, name) != value:
            option = f"{section}.{name}" if section else name
            raise UserError(
                f"--{option.replace('_', '-')} {getattr(config, name)}: got it with {value} in {path}; expected the "
                "same value in both, or in one only"
            )


def _is_passed(key: str) -> bool:
    return key in PASSED or key.partition(".")[0] in PASSED_SECTIONS


def passed_on(path: str | None, offloaded: Iterable[str] = ()) -> Tree:
    """The part of the file that only DeepSpeed knows, as a tree: bucket sizes, overlap, logs.

    offloaded: the sections of offloading that are in use (`offload_optimizer`); keys of the others mean nothing
    """
    tree: Tree = {}
    for key, value in read(path).items() if path else ():
        *sections, name = key.split(".")
        unused = sections[1:] and sections[1].startswith("offload_") and sections[1] not in offloaded
        if unused or not _is_passed(key):
            continue
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree
