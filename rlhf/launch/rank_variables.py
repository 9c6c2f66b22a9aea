"""The rank of this process in torchrun's variables, whatever launcher has started it. Torch-free."""

import os
import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""variables in which a launcher tells a process its rank"""
OPEN_MPI = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""torchrun's variable of each `OMPI_COMM_WORLD_...` of mpirun"""
ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "--dtype",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "--batch-size, which is global,",
    "ACCELERATE_GRADIENT_CLIPPING": "--max-grad-norm",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "--zero-stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "--offload-optimizer",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "--offload-param",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "--deepspeed-config",
    "ACCELERATE_USE_FSDP": "--zero-stage",
    "ACCELERATE_USE_MEGATRON_LM": "--tensor-parallel-size",
    "ACCELERATE_DYNAMO_BACKEND": "--torch-compile",
}
"""by variable in which `accelerate launch` passes a setting on: the option that has its effect"""
SILENT = ("", "no", "none", "auto", "false", "0", "1")
"""values of these variables that ask for nothing. accelerate sets most of them, whether the user wrote them or not"""
PORTS = range(20000, 30000)


def world_size() -> int:
    """How many processes the launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_world_size() -> int | None:
    """How many of them are on this machine; None if the launcher does not say, or there is none."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of deepspeed, mpirun or srun. Existing values are not changed. Hide the GPUs
    after `accelerate launch --cpu`, before torch is imported."""
    if environment.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" not in environment and "OMPI_COMM_WORLD_RANK" in environment:
        environment.update({ours: environment[f"OMPI_COMM_WORLD_{theirs}"] for theirs, ours in OPEN_MPI.items()})
        if environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"]:
            job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
            _set_meeting_point(environment, "127.0.0.1", zlib.crc32(job.encode()))
    if "RANK" not in environment:
        _adopt_srun(environment)
    elif "LOCAL_SIZE" in environment:  # deepspeed's
        environment.setdefault("LOCAL_WORLD_SIZE", environment["LOCAL_SIZE"])


def settings_of_accelerate(environment: Mapping[str, str]) -> Iterator[str]:
    """`--dtype here, in place of ACCELERATE_MIXED_PRECISION=bf16` for each setting that accelerate passes on, and that
    nobody here reads."""
    for name, option in ACCELERATE.items():
        if environment.get(name, "").lower() not in SILENT:
            yield f"{option} here, in place of {name}={environment[name]}"


def _adopt_srun(environment: MutableMapping[str, str]) -> None:
    """Set them in a job step of several tasks. A batch script is no job step: a process that it starts is alone."""
    size = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if "SLURM_PROCID" not in environment or size < 2:
        return
    node = int(environment.get("SLURM_NODEID", 0))
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["WORLD_SIZE"] = str(size)
    environment["NODE_RANK"] = str(node)
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node < len(counts):
        environment["LOCAL_WORLD_SIZE"] = str(counts[node])
    first = first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
    _set_meeting_point(environment, first, int(environment.get("SLURM_JOB_ID", 0)))


def _set_meeting_point(environment: MutableMapping[str, str], address: str, job: int) -> None:
    """All tasks must choose the same port, and two jobs on one host should seldom choose the same."""
    environment.setdefault("MASTER_ADDR", address)
    environment.setdefault("MASTER_PORT", str(PORTS[job % len(PORTS)]))


def first_host(nodes: str) -> str:
    """`n07` of `n[07-09,12],m1`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert match is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def tasks_per_node(text: str) -> list[int]:
    """`[2, 2, 2, 1]` of `2(x3),1`."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in groups for _ in range(int(times or 1))]
