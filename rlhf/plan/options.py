"""Options of a plan: the devices to plan for. Torch-free, like rlhf.config.options."""

import re
from typing import Any

from pydantic import Field, field_validator

from rlhf.config import Config

UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30}


class PlanOptions(Config):
    """The devices to plan for; the defaults are those of this machine."""

    plan: bool = False
    """print memory, rough time and disk of each stage and model, then exit; no weights are loaded"""
    devices: int | None = Field(None, ge=1)
    """--plan: number of devices; by default the number that the run would use on this machine"""
    device: str | None = None
    """--plan: kind of device, such as H100, A100-40GB, A6000, L4, 3090, MI300X or cpu (another name lists all)"""
    device_memory: str | None = None
    """--plan: memory of a device, such as 80GB"""
    host_memory: str | None = None
    """--plan: CPU memory for each device, such as 200GB; by default this machine's memory, divided by the devices"""
    device_tflops: float | None = Field(None, gt=0)
    """--plan: peak speed of a device in the compute dtype, 10^12 operations per second; training reaches 0.4 of it"""

    @field_validator("device_memory", "host_memory")
    @classmethod
    def _is_a_size(cls, value: Any) -> Any:
        if value is not None:
            number_of_bytes(value)
        return value


def number_of_bytes(text: str) -> float:
    """`80GB` in bytes. Raises: ValueError."""
    match = re.fullmatch(r"([\d.]+)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].upper() not in UNITS or match[1].count(".") > 1:
        raise ValueError("expected a size such as 80GB or 141GiB")
    return float(match[1]) * UNITS[match[2].upper()]
