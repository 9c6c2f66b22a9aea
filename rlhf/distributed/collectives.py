"""Ranks: one door to torch.distributed, the same on one CPU process and on many nodes."""

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from rlhf.distributed import rendezvous
from rlhf.errors import UserError

ALIKE = "RLHF_RANKS_ALIKE"
"""variable of this process: ranks next to each other that work on the same rows, each on its part of the model or of
the tokens"""


@contextlib.contextmanager
def process_group(timeout_s: float = 1800) -> Iterator[None]:
    """The process group for the length of a run, always destroyed at its end.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun, deepspeed and accelerate
    set them; without them this process is alone. Leaving the group open made 11 of 15 good runs exit
    non-zero, hence the `finally`.
    A collective that has waited `timeout_s` seconds for another rank fails.

    Raises: UserError if this rank has no GPU where others have, or finds nobody at that address.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
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

    # The shared-memory all-reduce is compiled with g++ on first use (20 to 40 s, and an error without a compiler).
    compatible["deepspeed_shm_comm"] = False
    backend, patience = "nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=timeout_s)
    if rendezvous.several():
        rendezvous.choose_interface()
        dist.init_process_group(
            backend,
            store=rendezvous.group_store(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=patience,
            device_id=device if device.type == "cuda" else None,
        )
    deepspeed.init_distributed(dist_backend=backend, timeout=patience, verbose=False)
    # DeepSpeed makes groups of its own and names no timeout: its backward pass would wait for 30 minutes.
    usual = {name: getattr(c10d, name) for name in ("default_pg_timeout", "default_pg_nccl_timeout")}
    vars(c10d).update(dict.fromkeys(usual, patience))
    try:
        yield
    finally:
        vars(c10d).update(usual)
        dist.destroy_process_group()
        split = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu")
        for name in ("_WORLD_GROUP", *split):
            setattr(groups, name, None)  # DeepSpeed would go on using those that are gone
        deepspeed.comm.comm.cdb = None


def _require_device(device: torch.device) -> None:
    """Raises: UserError if this process has a higher number on its host than there are GPUs."""
    count = torch.cuda.device_count()
    if device.index >= count:
        raise UserError(
            f"rank {rank()} on {socket.gethostname()}: is process {device.index} of that host, which has {count} GPUs; "
            "start at most one process for each"
        )


def local_device() -> torch.device:
    """The device of this process: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def work_alike(count: int) -> None:
    """From now on every `count` ranks next to each other get the same rows: they share one model, or its tokens."""
    os.environ[ALIKE] = str(count)


def alike() -> int:
    """How many ranks get the same rows as this one, itself included."""
    return int(os.environ.get(ALIKE, 1))


def data_rank() -> int:
    """The number of this rank's share of the rows; ranks that work alike have the same."""
    return rank() // alike()


def data_world_size() -> int:
    """Into how many shares rows are dealt out: the number of ranks, unless some work alike."""
    return world_size() // alike()


def leads_share() -> bool:
    """Whether this is the first of the ranks that work alike."""
    return rank() % alike() == 0


def alike_group() -> Any:
    """The ranks that work alike with this one, as a group; every rank calls this together."""
    groups = [dist.new_group(range(first, first + alike())) for first in range(0, world_size(), alike())]
    return groups[data_rank()]


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The elementwise sum of `tensor` over all shares of the rows, in float64 so that counts stay exact.

    Ranks that work alike bring the same, which counts once.
    """
    total = tensor.detach().to(torch.float64)
    if world_size() > 1:
        total = total.to(local_device(), copy=True)  # NCCL takes no tensor of the CPU
        dist.all_reduce(total)
        total = total.to(tensor.device) / alike()
    return total


def max_over_ranks(numbers: Sequence[float]) -> list[float]:
    """The elementwise greatest of `numbers` over all ranks."""
    if world_size() == 1:
        return list(numbers)
    greatest = torch.tensor(numbers, dtype=torch.float64, device=local_device())
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return [float(number) for number in greatest.tolist()]


def broadcast(tensor: Tensor, source: int) -> None:
    """Fill `tensor`, of the same shape and dtype on every rank, with that of rank `source`."""
    if world_size() > 1:
        dist.broadcast(tensor, source)


def of_share(value: Any) -> Any:
    """What the first of the ranks that work alike with this one brings as `value`: the same for all of them."""
    return value if alike() == 1 else gather_objects(value)[rank() - rank() % alike()]


def gather_shares(value: Any) -> list[Any]:
    """What each share of the rows brings as `value`, in the order of `data_rank`, on every rank."""
    return gather_objects(value)[:: alike()]


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
