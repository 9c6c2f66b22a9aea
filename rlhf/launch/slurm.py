"""The place of a process that srun has started, told as torchrun tells it. Torch-free."""

import re
from collections.abc import MutableMapping

PORTS = range(20000, 30000)


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT from SLURM's variables
    of a step of several tasks, unless a launcher has set RANK. Addresses that are given stay.

    A batch script is no step: what it starts is alone.
    """
    size = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if "RANK" in environment or "SLURM_PROCID" not in environment or size < 2:
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
