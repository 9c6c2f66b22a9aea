"""Kinds of devices: memory and peak speed, from the data sheets of their makers; and the options that name one.

Importing this module must not import torch.
"""

import re
from dataclasses import dataclass

from pydantic import ByteSize, Field, field_validator

from rlhf.config import Config, suggest
from rlhf.errors import UserError


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of the maker."""

    kind: str
    memory: float
    flops: float
    """operations per second, dense, in bf16 and fp16, with sums in fp32"""
    flops_fp32: float
    bf16: bool = True
    """whether it multiplies bf16 fast; otherwise `--dtype auto` is fp16 there"""

    def peak(self, b: int) -> float:
        """Operations per second on numbers of `b` bytes."""
        return self.flops_fp32 if b == 4 else self.flops


DEVICES = (
    # NVIDIA's data sheets of the HGX and DGX systems, halves of their figures with sparsity
    Device("B200", 180e9, 2250e12, 75e12),
    Device("H200", 141e9, 989e12, 67e12),
    Device("H100", 80e9, 989e12, 67e12),
    Device("H800", 80e9, 989e12, 67e12),
    Device("H20", 96e9, 148e12, 44e12),
    Device("A100", 80e9, 312e12, 19.5e12),
    Device("A100-40GB", 40e9, 312e12, 19.5e12),
    Device("A800", 80e9, 312e12, 19.5e12),
    Device("V100", 32e9, 125e12, 15.7e12, bf16=False),
    Device("V100-16GB", 16e9, 125e12, 15.7e12, bf16=False),
    # NVIDIA's data sheets of PCIe cards for servers and workstations (H100: 1,513 TFLOPS with sparsity as a PCIe card,
    # 1,671 as NVL, 1,979 as SXM)
    Device("H200-NVL", 141e9, 835.5e12, 60e12),
    Device("H100-NVL", 94e9, 835.5e12, 60e12),
    Device("H100-PCIe", 80e9, 756.5e12, 51.2e12),
    Device("L40S", 48e9, 362e12, 91e12),
    Device("L40", 48e9, 181e12, 90.5e12),
    Device("L20", 48e9, 119.5e12, 59.8e12),
    Device("L4", 24e9, 121e12, 30.3e12),
    Device("A40", 48e9, 149.7e12, 37.4e12),
    Device("A30", 24e9, 165e12, 10.3e12),
    Device("A10", 24e9, 125e12, 31.2e12),
    Device("A10G", 24e9, 70e12, 35e12),
    Device("T4", 16e9, 65e12, 8.1e12, bf16=False),
    Device("A6000", 48e9, 154.8e12, 38.7e12),
    Device("RTX-6000-Ada", 48e9, 364e12, 91.1e12),
    # NVIDIA's white papers of GA102, AD102 and GB202: cards for desktops sum in fp32 at half the speed
    Device("RTX-3090", 24e9, 71e12, 35.6e12),
    Device("RTX-4090", 24e9, 165e12, 82.6e12),
    Device("RTX-5090", 32e9, 209.5e12, 104.8e12),
    # AMD's data sheets. A MI250X is two devices for torch: the figures of one
    Device("MI250X", 64e9, 191.5e12, 23.9e12),
    Device("MI300X", 192e9, 1307e12, 163.4e12),
    Device("MI325X", 256e9, 1307e12, 163.4e12),
)
SLOW_BF16 = frozenset(device.kind for device in DEVICES if not device.bf16)


def device_of_kind(kind: str) -> Device:
    """The device of `--device`: its kind in any case, or the part of it that only one kind has (3090, MI300).

    Raises: UserError for an unknown kind.
    """
    name = kind.upper()
    exact = [device for device in DEVICES if device.kind.upper() == name]
    similar = [device for device in DEVICES if re.search(rf"(^|-){re.escape(name)}(?!\d)", device.kind.upper())]
    matching = exact or similar
    if len(matching) != 1:
        available = [*(device.kind for device in DEVICES), "cpu"]
        raise UserError(f"--device {kind}: expected one of {', '.join(available)}{suggest(name, available)}")
    return matching[0]


def device_of_driver(name: str) -> Device | None:
    """The device with the name that the driver reports, such as `NVIDIA A100-SXM4-40GB`; None if it is unknown."""
    words = set(re.split(r"[\s-]+", name.upper()))
    matching = [device for device in DEVICES if set(device.kind.upper().split("-")) <= words]
    return max(matching, key=lambda device: device.kind.count("-"), default=None)


SIZE = re.compile(r"\s*\d*\.?\d+\s*[a-zA-Z]*\s*")
"""a number and a unit; pydantic alone reads `1,5TB` as one byte"""


class PlanOptions(Config):
    """The devices to plan for; the defaults are those of this machine."""

    plan: bool = False
    """print memory and disk of each stage and model, then exit; no weights are loaded"""
    devices: int | None = Field(None, ge=1)
    """--plan: number of devices; by default the number that the run would use on this machine"""
    device: str | None = None
    """--plan: kind of device, such as H100, A100-40GB, A6000, L4, 3090, MI300X or cpu (another name lists all)"""
    device_memory: ByteSize | None = None
    """--plan: memory of a device, such as 80GB"""
    host_memory: ByteSize | None = None
    """--plan: CPU memory for each device, such as 200GB; by default this machine's memory, divided by the devices; for
    GPUs that are not here twice theirs"""

    @field_validator("device_memory", "host_memory", mode="before")
    @classmethod
    def _is_a_size(cls, value: object) -> object:
        if isinstance(value, str) and SIZE.fullmatch(value) is None:
            raise ValueError("expected a size such as 80GB or 141GiB")
        return value
