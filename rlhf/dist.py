"""Ranks: one door to torch.distributed, the same on one CPU process and on many nodes."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@contextlib.contextmanager
def process_group(timeout_s: int = 1800) -> Iterator[None]:
    """The process group for the length of a run, always destroyed at its end.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun, deepspeed and accelerate
    set them; without them this process is alone. Leaving the group open made 11 of 15 good runs exit
    non-zero, hence the `finally`.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible
    from deepspeed.utils import groups

    # The shared-memory all-reduce is compiled with g++ on first use (20 to 40 s, and an error without a compiler).
    compatible["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
        verbose=False,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        groups._WORLD_GROUP = None  # DeepSpeed would go on using the one that is gone


def local_device() -> torch.device:
    """The device of this process: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The elementwise sum of `tensor` over all ranks, in float64 so that counts stay exact."""
    total = tensor.detach().to(torch.float64)
    if world_size() > 1:
        total = total.to(local_device(), copy=True)  # NCCL takes no tensor of the CPU
        dist.all_reduce(total)
        total = total.to(tensor.device)
    return total


def broadcast(tensor: Tensor, source: int) -> None:
    """Fill `tensor`, of the same shape and dtype on every rank, with that of rank `source`."""
    if world_size() > 1:
        dist.broadcast(tensor, source)


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
