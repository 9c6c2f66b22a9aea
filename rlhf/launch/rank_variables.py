"""The rank of this process, from whichever launcher has started it, in torchrun's variables. Torch-free."""

import os
import re
from collections.abc import Iterable, MutableMapping

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""variables in which a launcher tells a process its rank"""
OPEN_MPI = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""torchrun's variable of each `OMPI_COMM_WORLD_...` of mpirun"""
PORTS = range(20000, 30000)


def world_size() -> int:
    """How many processes the launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def without_local_rank(words: Iterable[str]) -> list[str]:
    """A command line less the word that the deepspeed launcher adds to it; the environment has it too."""
    return [word for word in words if not re.match(r"--local[-_]rank=", word)]


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of deepspeed, mpirun or srun. What is set already stays."""
    if "RANK" not in environment and "OMPI_COMM_WORLD_RANK" in environment:
        environment.update({ours: environment[f"OMPI_COMM_WORLD_{theirs}"] for theirs, ours in OPEN_MPI.items()})
    if "RANK" not in environment:
        _adopt_srun(environment)
    elif "LOCAL_SIZE" in environment:  # deepspeed's
        environment.setdefault("LOCAL_WORLD_SIZE", environment["LOCAL_SIZE"])


def _adopt_srun(environment: MutableMapping[str, str]) -> None:
    """From a step of several tasks. A batch script is no step: what it starts is alone."""
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
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "localhost")))
    # Every task must come to the same, and two jobs on one node seldom to that of the other.
    job = int(environment.get("SLURM_JOB_ID", 0))
    environment.setdefault("MASTER_PORT", str(PORTS[job % len(PORTS)]))


def first_host(nodes: str) -> str:
    """`n07` of `n[07-09,12],m1`."""
    found = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    assert found is not None
    return found[1] + (found[2] or "") + found[3]


def tasks_per_node(text: str) -> list[int]:
    """`[2, 2, 2, 1]` of `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
