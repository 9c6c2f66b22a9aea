"""The machine that a plan is made for: its devices, and the memory of its host."""

from dataclasses import dataclass, replace

import psutil
import torch

from rlhf.launch import launcher, rank_variables
from rlhf.plan.devices import Device, PlanOptions, device_of_driver, device_of_kind

USABLE = 0.9
"""share of a GPU's memory to plan with; its context, communication buffers and fragmentation take the remainder"""
PROGRAM = 0.65e9
"""bytes of Python and the libraries in one process (torch 2.13 for CPUs: 0.48e9 at the start, 0.62e9 after a step)"""
HOST_SHARE = 2.0
"""CPU memory of a machine that is not this one, over that of its GPUs: the least that clouds and makers put beside them
(8 x H100 or A100 80 GB: 1 to 2 TB; 24 GB cards: 48 to 64 GB)"""
NODE = 8
"""devices in a node"""
UTILISATION = 0.4
"""share of the peak speed that training and scoring reach"""
CORE = Device("cpu", 0.0, 0.55e12, 0.21e12)
"""One CPU core with AVX512-BF16. Training a 135M Llama reached 0.22e12 and 0.085e12 operations per second on it, 0.4 of
these figures (2026-11)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that a plan is made for."""

    device: Device
    count: int
    memory: float
    """usable bytes of one device"""
    host: float
    """bytes of CPU memory for each device"""
    assumed_host: bool = False
    """whether nobody has said so: it is the memory of another machine"""

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    def flops(self, b: int) -> float:
        """Operations per second that training reaches, for numbers of `b` bytes."""
        return UTILISATION * self.device.peak(b)


def describe_machine(options: PlanOptions, processes: int) -> Machine:
    """The machine that `options` describe. `processes`: the number that the run would start.

    CPU processes share the cores and the memory of this machine, with as many as another launcher says are on it; else
    with all.
    Raises: UserError for an unknown kind of device.
    """
    count = options.devices or processes
    device = _device(options, options.devices or rank_variables.local_world_size() or processes)
    if options.device_memory is not None:
        device = replace(device, memory=float(options.device_memory))
    elsewhere = device.kind != CORE.kind and not torch.cuda.is_available() and options.host_memory is None
    host = (
        HOST_SHARE * device.memory
        if elsewhere
        else float(options.host_memory or psutil.virtual_memory().available / min(count, NODE))
    )
    usable = device.memory if device.kind == CORE.kind else USABLE * device.memory
    return Machine(device, count, usable, host, elsewhere)


def _device(options: PlanOptions, sharing: int) -> Device:
    """sharing: processes of this machine, if it has no GPU; --device-memory alone means GPUs that it need not have"""
    here = torch.cuda.is_available()
    if options.device == CORE.kind or (options.device is None and options.device_memory is None and not here):
        speed = launcher.cores() / sharing
        memory = psutil.virtual_memory().available / sharing
        return replace(CORE, memory=memory, flops=CORE.flops * speed, flops_fp32=CORE.flops_fp32 * speed)
    if options.device is not None:
        return device_of_kind(options.device)
    assumed = device_of_kind("A100")
    memory = float(torch.cuda.get_device_properties(0).total_memory) if here else assumed.memory
    return replace(known_gpu() or assumed, memory=memory)


def known_gpu() -> Device | None:
    """The GPU of this process if its kind is known; None for another one, or without a GPU."""
    if not torch.cuda.is_available():
        return None
    return device_of_driver(torch.cuda.get_device_properties(0).name)
