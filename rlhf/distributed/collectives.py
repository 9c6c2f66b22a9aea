"""Ranks and collectives: the interface to torch.distributed, the same on one CPU process and on many nodes.

A replica is a group of consecutive ranks that have the same rows, because they share one model (tensor parallelism) or
the tokens of each row (sequence parallelism); mostly it is one rank. `dp_rank` and `dp_size` count replicas: rows are
dealt to them, and what all rows add up to (`sum_over_ranks`) counts each of them once.
"""

import atexit
import contextlib
import datetime
import functools
import gc
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from rlhf.distributed import rendezvous
from rlhf.errors import UserError

T = TypeVar("T")
RANKS_PER_REPLICA = "RLHF_RANKS_PER_REPLICA"
"""environment variable: number of consecutive ranks that compute the same rows, each its part of the model or of the
tokens (tensor or sequence parallelism)"""


@contextlib.contextmanager
def process_group(timeout_s: float = 1800) -> Iterator[None]:
    """The process group of a run, which is always destroyed at its end.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun, deepspeed and accelerate
    set them; without them there is one process. Without destroying the group, 11 of 15 successful runs
    ended with an exit code other than 0.
    A collective fails after waiting `timeout_s` seconds for another rank.

    Raises: UserError if there are more processes than GPUs on this host, or nothing answers at that address.
    """
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    device = local_device()
    if device.type == "cuda":
        _require_device(device)
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible
    from deepspeed.utils import groups

    _freeze_imports()
    # The shared-memory all-reduce is compiled with g++ on first use (20 to 40 s, and an error without a compiler).
    compatible["deepspeed_shm_comm"] = False
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=timeout_s)
    if rendezvous.is_multi_process():
        rendezvous.choose_interface()
        dist.init_process_group(
            backend,
            store=rendezvous.group_store(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    # DeepSpeed creates further groups without a timeout: its backward pass would wait for 30 minutes.
    default_timeouts = {name: getattr(c10d, name) for name in ("default_pg_timeout", "default_pg_nccl_timeout")}
    vars(c10d).update(dict.fromkeys(default_timeouts, timeout))
    try:
        yield
    finally:
        vars(c10d).update(default_timeouts)
        dist.destroy_process_group()
        parallel_groups = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu")
        for name in ("_WORLD_GROUP", *parallel_groups):
            setattr(groups, name, None)  # DeepSpeed would use destroyed groups
        deepspeed.comm.comm.cdb = None


@functools.cache
def _freeze_imports() -> None:
    """Take what has been imported out of garbage collection: DeepSpeed collects several times for each engine, a third
    of a second each among a million objects of libraries."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # triton reports what is left at the end, and frozen objects are


def _require_device(device: torch.device) -> None:
    """Raises: UserError if this host has no GPU with the number of this process."""
    count = torch.cuda.device_count()
    if device.index >= count:
        raise UserError(
            f"rank {rank()} on {socket.gethostname()}: is process {device.index} of that host, which has {count} GPUs; "
            "start at most one process for each"
        )


def local_device() -> torch.device:
    """The device of this process: its GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def set_ranks_per_replica(count: int) -> None:
    """Let every `count` consecutive ranks get the same rows: they share one model, or its tokens."""
    os.environ[RANKS_PER_REPLICA] = str(count)


def ranks_per_replica() -> int:
    """The number of ranks that get the same rows as this one, including itself."""
    return int(os.environ.get(RANKS_PER_REPLICA, 1))


def dp_rank() -> int:
    """The number of this rank among those that have different rows. Ranks with the same rows have the same number."""
    return rank() // ranks_per_replica()


def dp_size() -> int:
    """The number of parts into which rows are divided: the number of ranks, unless some get the same rows."""
    return world_size() // ranks_per_replica()


def rows_of_rank(count: int) -> range:
    """The numbers of this rank's rows, of `count` that are dealt out in turn. `of_all_ranks` joins them again."""
    return range(dp_rank(), count, dp_size())


def leads_replica() -> bool:
    """Whether this is the first of the ranks with the same rows."""
    return rank() % ranks_per_replica() == 0


def replica_group() -> dist.ProcessGroup:
    """The process group of the ranks with the same rows as this one. All ranks must call it."""
    groups = [
        dist.new_group(range(first, first + ranks_per_replica()))
        for first in range(0, world_size(), ranks_per_replica())
    ]
    return groups[dp_rank()]


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The elementwise sum of `tensor` over all rows, in float64 so that counts stay exact.

    Ranks with the same rows have the same `tensor`, which counts once.
    """
    total = tensor.detach().to(torch.float64)
    if world_size() > 1:
        total = total.to(local_device(), copy=True)  # NCCL accepts no CPU tensor
        dist.all_reduce(total)
        total = total.to(tensor.device) / ranks_per_replica()
    return total


def max_over_ranks(numbers: Sequence[float]) -> list[float]:
    """The elementwise maximum of `numbers` over all ranks."""
    if world_size() == 1:
        return list(numbers)
    maxima = torch.tensor(numbers, dtype=torch.float64, device=local_device())
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return [float(number) for number in maxima.tolist()]


def broadcast(tensor: Tensor, source: int) -> None:
    """Overwrite `tensor` with that of rank `source`. Shape and dtype are the same on every rank."""
    if world_size() > 1:
        dist.broadcast(tensor, source)


def broadcast_in_replica(value: T) -> T:
    """The `value` of the first of the ranks with the same rows as this one."""
    return value if ranks_per_replica() == 1 else gather_objects(value)[rank() - rank() % ranks_per_replica()]


def gather_replicas(value: T) -> list[T]:
    """The `value` of the first rank of each replica, in the order of `dp_rank`, on every rank."""
    return gather_objects(value)[:: ranks_per_replica()]


def of_all_ranks(values: Sequence[T]) -> list[T]:
    """The values of all replicas, on every rank, in the order in which they were dealt: one to each in turn."""
    by_rank: list[list[T]] = gather_replicas(list(values))
    return [part[i] for i in range(len(by_rank[0])) for part in by_rank if i < len(part)]


def gather_objects(value: T) -> list[T]:
    """The `value` of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
