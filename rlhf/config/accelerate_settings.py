"""What `accelerate launch` asks for in the environment: settings of our options, or a refusal. Torch-free.

accelerate passes its options on as variables, whether the user wrote them or not. A default that says nothing, such as
`--mixed_precision no`, changes nothing here.
"""

from collections.abc import Callable, Mapping, MutableMapping

from rlhf.config.deepspeed_json import Setting, Settings
from rlhf.errors import UserError


def _offload(device: str) -> bool:
    return device in ("cpu", "nvme")


OPTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "ACCELERATE_MIXED_PRECISION": ("dtype", str),
    "ACCELERATE_GRADIENT_CLIPPING": ("max_grad_norm", float),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", int),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer", _offload),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param", _offload),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": ("offload_nvme", str),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": ("offload_nvme", str),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed_config", str),
}
"""our option for each variable, and how its text is read"""
SILENT = {"no", "none", "auto", ""}
"""values that mean: as the program decides"""
REFUSED = {
    "ACCELERATE_USE_FSDP": "models are sharded by DeepSpeed's ZeRO here; start with `accelerate launch --multi_gpu` "
    "and write --zero-stage 3 (as FULL_SHARD; 2 is SHARD_GRAD_OP), with --offload-optimizer, --offload-param and "
    "--gradient-checkpointing as you need them",
    "ACCELERATE_DYNAMO_BACKEND": "its dynamo is not used here; use --torch-compile",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not used here; --tensor-parallel-size splits layers",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "use --tensor-parallel-size, --sequence-parallel-size or --zero-stage",
    "ACCELERATE_IN_TPU_POD": "TPUs are not supported, expected CUDA GPUs or CPUs",
    "ACCELERATE_CPU_AFFINITY": "accelerate binds processes in its own library, which is not used here; start with "
    "numactl, or `deepspeed --bind_cores_to_rank`",
    "ACCELERATE_DEBUG_MODE": "use TORCH_DISTRIBUTED_DEBUG=DETAIL in place of --debug",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "mixtures of experts are not sharded by expert here",
}
"""variables of settings that no option here follows"""


def adopt(environment: MutableMapping[str, str]) -> None:
    """Hide the GPUs after `accelerate launch --cpu`, before torch is imported."""
    if environment.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        environment["CUDA_VISIBLE_DEVICES"] = ""


def settings(environment: Mapping[str, str]) -> Settings:
    """The options that accelerate's variables set. Raises: UserError for a setting that cannot be followed."""
    for name, cure in REFUSED.items():
        if environment.get(name, "").lower() not in SILENT | {"0", "false"}:
            raise UserError(f"accelerate launch ({name}={environment[name]}): {cure}")
    if environment.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        raise UserError("accelerate launch --mixed_precision fp8: expected bf16, fp16 or no")
    result = {}
    for name, (option, read) in OPTIONS.items():
        text = environment.get(name, "")
        nothing = SILENT - {"none"} if read is _offload else SILENT
        if text.lower() not in nothing:
            result[option] = Setting(read(text), f"accelerate launch ({name}={text})")
    return result
