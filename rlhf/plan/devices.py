"""Kinds of devices: memory and peak speed, from the data sheets of their makers."""

import re
from dataclasses import dataclass

from rlhf.config import suggest
from rlhf.errors import UserError


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of the maker. Bandwidths are in bytes per second; `link` and `network` are what one device sends inside
    a node and between nodes."""

    kind: str
    memory: float
    flops: float
    """operations per second, dense, in bf16 and fp16, with sums in fp32"""
    flops_fp32: float
    bandwidth: float
    link: float
    network: float
    bf16: bool = True
    """whether it multiplies bf16 fast; otherwise `--dtype auto` is fp16 there"""


PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9
"""16 lanes, in one direction. Cards of a desktop have no faster link."""

DEVICES = (
    # NVIDIA's data sheets of the HGX and DGX systems, halves of their figures with sparsity; one direction of NVLink
    Device("B200", 180e9, 2250e12, 75e12, 7.7e12, 900e9, 50e9),
    Device("H200", 141e9, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    Device("H100", 80e9, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    Device("H800", 80e9, 989e12, 67e12, 3.35e12, 200e9, 50e9),
    Device("H20", 96e9, 148e12, 44e12, 4.0e12, 450e9, 50e9),
    Device("A100", 80e9, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
    Device("A100-40GB", 40e9, 312e12, 19.5e12, 1.56e12, 300e9, 25e9),
    Device("A800", 80e9, 312e12, 19.5e12, 2.04e12, 200e9, 25e9),
    Device("V100", 32e9, 125e12, 15.7e12, 0.9e12, 150e9, 12.5e9, bf16=False),
    Device("V100-16GB", 16e9, 125e12, 15.7e12, 0.9e12, 150e9, 12.5e9, bf16=False),
    # NVIDIA's data sheets of PCIe cards for servers and workstations. H100 (1,513 TFLOPS with sparsity as a PCIe card,
    # 1,671 as NVL, 1,979 as SXM) and H200: a bridge joins two or four cards only, so links are those of PCIe
    Device("H200-NVL", 141e9, 835.5e12, 60e12, 4.8e12, PCIE_5, 50e9),
    Device("H100-NVL", 94e9, 835.5e12, 60e12, 3.9e12, PCIE_5, 50e9),
    Device("H100-PCIe", 80e9, 756.5e12, 51.2e12, 2.0e12, PCIE_5, 50e9),
    Device("L40S", 48e9, 362e12, 91e12, 0.86e12, PCIE_4, 12.5e9),
    Device("L40", 48e9, 181e12, 90.5e12, 0.86e12, PCIE_4, 12.5e9),
    Device("L20", 48e9, 119.5e12, 59.8e12, 0.86e12, PCIE_4, 12.5e9),
    Device("L4", 24e9, 121e12, 30.3e12, 0.3e12, PCIE_4, 12.5e9),
    Device("A40", 48e9, 149.7e12, 37.4e12, 0.696e12, PCIE_4, 12.5e9),
    Device("A30", 24e9, 165e12, 10.3e12, 0.933e12, PCIE_4, 12.5e9),
    Device("A10", 24e9, 125e12, 31.2e12, 0.6e12, PCIE_4, 12.5e9),
    Device("A10G", 24e9, 70e12, 35e12, 0.6e12, PCIE_4, 12.5e9),
    Device("T4", 16e9, 65e12, 8.1e12, 0.32e12, PCIE_3, 12.5e9, bf16=False),
    Device("A6000", 48e9, 154.8e12, 38.7e12, 0.768e12, PCIE_4, 12.5e9),
    Device("RTX-6000-Ada", 48e9, 364e12, 91.1e12, 0.96e12, PCIE_4, 12.5e9),
    # NVIDIA's white papers of GA102, AD102 and GB202: cards for desktops sum in fp32 at half the speed
    Device("RTX-3090", 24e9, 71e12, 35.6e12, 0.936e12, PCIE_4, 12.5e9),
    Device("RTX-4090", 24e9, 165e12, 82.6e12, 1.008e12, PCIE_4, 12.5e9),
    Device("RTX-5090", 32e9, 209.5e12, 104.8e12, 1.792e12, PCIE_5, 12.5e9),
    # AMD's data sheets. A MI250X is two devices for torch: the figures of one; Infinity Fabric in one direction
    Device("MI250X", 64e9, 191.5e12, 23.9e12, 1.6e12, 200e9, 25e9),
    Device("MI300X", 192e9, 1307e12, 163.4e12, 5.3e12, 448e9, 50e9),
    Device("MI325X", 256e9, 1307e12, 163.4e12, 6.0e12, 448e9, 50e9),
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
        raise UserError(f"--device {kind}: expected one of {', '.join(available)}{suggest(kind, available)}")
    return matching[0]


def device_of_driver(name: str) -> Device | None:
    """The device with the name that the driver reports, such as `NVIDIA A100-SXM4-40GB`; None if it is unknown."""
    words = set(re.split(r"[\s-]+", name.upper()))
    matching = [device for device in DEVICES if set(device.kind.upper().split("-")) <= words]
    return max(matching, key=lambda device: device.kind.count("-"), default=None)
