"""Devices: how much they hold and how fast they are."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlhf.config import suggest
from rlhf.errors import UserError
from rlhf.plan.options import PlanOptions, number_of_bytes

USABLE = 0.9
"""share of a GPU's memory to plan with; the rest goes to its context, communication and fragments"""
PROGRAM = 0.65e9
"""bytes of Python and the libraries in one process (torch 2.13 for CPUs: 0.48 at the start, 0.62 after a step)"""
NODE = 8
"""devices of a node"""


@dataclass(frozen=True, slots=True)
class Device:
    """Makers' figures. Bandwidths in bytes a second; a link is what one device sends, inside a node and beyond."""

    kind: str
    memory: float
    flops: float
    """bf16 and fp16, dense, operations a second"""
    flops_fp32: float
    bandwidth: float
    link: float
    network: float


DEVICES = (
    Device("H200", 141e9, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    Device("H100", 80e9, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    Device("A100-40GB", 40e9, 312e12, 19.5e12, 1.56e12, 300e9, 25e9),
    Device("A100", 80e9, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
    Device("L40S", 48e9, 362e12, 91e12, 0.86e12, 32e9, 12.5e9),
    Device("V100", 32e9, 125e12, 15.7e12, 0.9e12, 150e9, 12.5e9),
    Device("RTX-4090", 24e9, 165e12, 82e12, 1.0e12, 32e9, 12.5e9),
)
CORE = Device("cpu", 0.0, 0.55e12, 0.21e12, 10e9, 2e9, 1e9)
"""One core with AVX512-BF16; training a Llama of 135M reached 0.22e12 and 0.085e12 on it, 0.4 of this (2026-11)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of one plan."""

    device: Device
    count: int
    memory: float
    """bytes of one device that may be used"""
    host: float
    """bytes of CPU memory for each device"""
    utilisation: float

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    def flops(self, b: int) -> float:
        """Operations a second that training reaches, for numbers of `b` bytes."""
        return self.utilisation * (self.device.flops_fp32 if b == 4 else self.device.flops)

    @property
    def link(self) -> float:
        """Bytes a second that a device sends."""
        return self.device.link if self.count <= NODE else self.device.network


def machine(options: PlanOptions, processes: int) -> Machine:
    """The machine that `options` describe; `processes`: those that the run would start here.

    Raises: UserError for a kind of device that is not known.
    """
    count = options.devices or processes
    device = _kind(options)
    if options.device_memory is not None:
        device = replace(device, memory=number_of_bytes(options.device_memory))
    if options.device_tflops is not None:
        device = replace(device, flops=options.device_tflops * 1e12, flops_fp32=options.device_tflops * 1e12)
    if options.device_bandwidth is not None:
        device = replace(device, bandwidth=options.device_bandwidth * 1e9)
    if options.link_bandwidth is not None:
        device = replace(device, link=options.link_bandwidth * 1e9, network=options.link_bandwidth * 1e9)
    share = 1 if device.kind == "cpu" else USABLE
    host = _host() / min(count, NODE)
    if options.host_memory is not None:
        host = number_of_bytes(options.host_memory)
    return Machine(device, count, share * device.memory, host, options.utilisation)


def _kind(options: PlanOptions) -> Device:
    kinds = {device.kind: device for device in DEVICES}
    if options.device == "cpu" or (options.device is None and not torch.cuda.is_available() and not _asked(options)):
        cores = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        each = cores / max(1, options.devices or 1)
        memory = _host() / max(1, options.devices or 1)
        return replace(CORE, memory=memory, flops=CORE.flops * each, flops_fp32=CORE.flops_fp32 * each)
    if options.device is not None:
        if options.device not in kinds:
            known = [*kinds, "cpu"]
            raise UserError(
                f"--device {options.device}: expected one of {', '.join(known)}{suggest(options.device, known)}"
            )
        return kinds[options.device]
    if not torch.cuda.is_available():
        return kinds["A100"]
    seen = torch.cuda.get_device_properties(0)
    alike = next((device for device in DEVICES if device.kind.split("-")[-1] in seen.name), kinds["A100"])
    return replace(alike, memory=float(seen.total_memory))


def _asked(options: PlanOptions) -> bool:
    """Whether the user names devices that need not be here: a memory alone means GPUs of that size."""
    return options.device_memory is not None


def _host() -> float:
    """Bytes of memory that are free on this machine."""
    told = Path("/proc/meminfo")
    for line in told.read_text(encoding="ascii").splitlines() if told.is_file() else ():
        if line.startswith("MemAvailable"):
            return float(line.split()[1]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
