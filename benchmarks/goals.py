"""The goals of the benchmarks' ratios and shares, (at least, aim), with AMX and without."""

import os

from benchmarks import outcome

Goal = tuple[float, float]

GOALS: dict[str, tuple[Goal, Goal]] = {
    "sft beside padded": ((5.0, 6.0), (4.0, 4.5)),
    "sft beside packed": ((4.7, 5.5), (3.2, 3.6)),
    "reward": ((5.0, 6.5), (4.2, 4.8)),
    "ppo": ((3.0, 4.0), (2.3, 3.0)),
    "rollout": ((3.5, 5.0), (3.0, 4.0)),
    "rollout beside vLLM": ((0.9, 1.2), (0.9, 1.2)),
    "sft beside padded with LoRA": ((3.0, 5.0), (3.0, 4.0)),
    "sft beside packed with LoRA": ((3.0, 5.0), (3.0, 4.0)),
    "reward with LoRA": ((3.0, 5.0), (3.0, 4.0)),
    "ppo with LoRA": ((2.0, 3.0), (2.0, 3.0)),
    "training, share of the peak": ((0.55, 0.65), (0.55, 0.65)),
    "decoding 16, share of the memory bound": ((0.55, 0.7), (0.45, 0.6)),
    "decoding 64, share of the memory bound": ((0.45, 0.7), (0.35, 0.6)),
}
"""name -> the goal with AMX, the goal without"""


def goal(name: str, lora: int | None = None) -> Goal:
    """At least, and the aim, on this machine; lora: the rank of the adapter, if one is trained."""
    with_amx, without = GOALS[name if lora is None else f"{name} with LoRA"]
    return with_amx if multiplies_with_amx() else without


def multiplies_with_amx() -> bool:
    """Whether the processor has AMX and oneDNN may use it (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 forbids it)."""
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or "ALL").upper()
    return "amx_bf16" in outcome.hardware()["flags"] and (limit in ("ALL", "DEFAULT") or "AMX" in limit)
