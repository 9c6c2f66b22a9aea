"""`python -m benchmarks.simulation`: a model of how training scales, from measurements on one process.

Prints a table of docs/scaling.md. The seconds per token are those of benchmarks/results (SmolLM2-135M in bf16 on two
cores). A formula gives the bytes that a device sends, over links of stated bandwidth, without overlap with computation.
Strong scaling divides the rows of a step among devices, weak scaling gives each device its own. An
efficiency is the time of computation over the total time.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import outcome
from rlhf.config.options import EngineOptions
from rlhf.plan import zero
from rlhf.plan.sizes import Size

MODEL = Size(134_515_008, 134_515_008, 28_311_552, 28_312_128, 30, 576, 2 * 30 * 192, 49_152)
"""SmolLM2-135M"""
DEVICES = (1, 2, 4, 8, 16, 64, 256, 1024)
LINKS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}
STRONG_ROWS, WEAK_ROWS = 1024, 8
"""rows of a step: in total, and of each device"""
STAGES = (1, 3)


def result(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((outcome.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return values


def efficiency(compute: float, devices: int, stage: int, link: float, engines: int = 1) -> float:
    """Efficiency of one step of `engines` models, which together take `compute` seconds on each device."""
    site = zero.RankLayout(devices)
    options = EngineOptions(zero_stage=stage, dtype="bf16")  # type: ignore[arg-type]
    return compute / (compute + engines * zero.bytes_sent(MODEL, options, 2, site) / link)


def lines() -> Iterator[list[str]]:
    """The cells of each row."""
    sft, ppo = result("sft"), result("ppo")
    row = sft["set"]["tokens"] / sft["set"]["dialogues"] / sft["contenders"]["ours"]["tokens_per_s"]["all"]["median"]
    iteration = sum(part["median"] for part in ppo["seconds_of_parts"].values())
    for devices in DEVICES:
        cells = [str(devices)]
        for compute, engines in ((row * STRONG_ROWS / devices, 1), (row * WEAK_ROWS, 1), (iteration, 2)):
            for stage in STAGES:
                each = (efficiency(compute, devices, stage, link, engines) for link in LINKS.values())
                cells.append(", ".join(f"{share:.2f}" for share in each))
        yield cells


def table() -> str:
    """A Markdown table. The two numbers of a cell are for the two links."""
    columns = (f"SFT, {STRONG_ROWS} rows a step", f"SFT, {WEAK_ROWS} rows a device", "PPO, 16 responses a device")
    head = ["devices", *(f"{name}, ZeRO {stage}" for name in columns for stage in STAGES)]
    return markdown(head, lines())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    body = [" | ".join(cells) for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in body)


if __name__ == "__main__":
    print(table())
