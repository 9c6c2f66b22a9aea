"""`--require`: conditions on the held-out numbers of a stage, without which its chain does not go on."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.chain.options import SECTIONS, ChainConfig
from rlhf.chain.stages import STAGES
from rlhf.config import suggest
from rlhf.config.command_line import without
from rlhf.errors import UserError
from rlhf.report.meanings import names_below
from rlhf.report.records import read_stage
from rlhf.report.verdict import changes

MISSED = 4
"""exit code of a chain that a condition has ended"""
CONDITION = re.compile(r"\s*(?:(\w+)\.)?(\w+)\s*([<>])\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition on a number of a stage's result."""

    text: str
    step: int
    metric: str
    above: bool
    """whether the number must be above the bound, else below it"""
    bound: float


def read_gates(chain: ChainConfig) -> list[Gate]:
    """The conditions of a chain. Raises: UserError for one that no stage of it can meet."""
    return [_read(text, chain) for text in chain.require]


def _read(text: str, chain: ChainConfig) -> Gate:
    parts = CONDITION.fullmatch(text)
    if parts is None:
        example = "eval_accuracy > 0.6" if chain.ALONE else "reward.eval_accuracy > 0.6"
        raise UserError(f"--require '{text}': expected a condition such as '{example}'")
    section, metric, sign, bound = parts.groups()
    sections = {name: step for step, name in SECTIONS.items() if not chain.ALONE or step in (chain.steps or ())}
    section = section or (next(iter(sections)) if chain.ALONE else None)
    if section not in sections:
        raise UserError(f"--require '{text}': expected {', '.join(sections)} and a dot before the name of the number")
    known = [name for name in names_below(STAGES[sections[section]].report.section) if name.startswith("eval_")]
    if metric not in known:
        raise UserError(
            f"--require '{text}': {STAGES[sections[section]].name} has no held-out number '{metric}'"
            f"{suggest(metric, known)}; docs/metrics.md lists them"
        )
    return Gate(text, sections[section], metric, sign == ">", float(bound))


def reasons(chain: ChainConfig, step: int) -> dict[Gate, str]:
    """Why a step's finished result does not meet conditions of the chain; empty if it meets all."""
    mine = [gate for gate in read_gates(chain) if gate.step == step]
    if not mine:
        return {}
    stage = read_stage(Path(chain.output_dir) / STAGES[step].name, STAGES[step])
    metrics: dict[str, Any] = (stage.manifest or {}).get("metrics", {})
    half_widths = {change.result.metric: change.half_width for change in changes(stage)}
    missed = {gate: _reason(gate, metrics, half_widths.get(gate.metric)) for gate in mine}
    return {gate: reason for gate, reason in missed.items() if reason}


def _reason(gate: Gate, metrics: dict[str, Any], half_width: float | None) -> str:
    """Why the condition is not met, by the end of the 95 % interval that is nearer to the bound if the number has one;
    empty if it is met."""
    value = metrics.get(gate.metric)
    if value is None or math.isnan(value):
        return f"--require '{gate.text}': the run has no such number"
    half = half_width if half_width is not None else metrics.get(f"{gate.metric}_ci95")
    end = value - (half or 0.0) * (1 if gate.above else -1)
    if (end > gate.bound) if gate.above else (end < gate.bound):
        return ""
    interval = "" if half is None else f", and the 95 % interval {'begins' if gate.above else 'ends'} at {end:.4g}"
    return f"--require '{gate.text}': {gate.metric} is {value:.4g}{interval}"


def without_missed(words: Sequence[str], chain: ChainConfig, step: int) -> list[str]:
    """A command line with those conditions of the chain that the step does not miss, in place of its own."""
    missed = reasons(chain, step)
    return [
        *without(words, ("require",)),
        "--require",
        *(gate.text for gate in read_gates(chain) if gate not in missed),
    ]
