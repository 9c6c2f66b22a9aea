"""Score sources: one number for each whole response. One file each; several combine into one score.

A penalty is a source whose scores are 0 or below, so that its weight is positive like any other's.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import plugins
from rlhf.config.options import FrozenOptions
from rlhf.errors import UserError
from rlhf.text.tokenizer import Template
from rlhf.types import Rollout, Samples

Combine = Literal["sum", "min"]

REFERENCE = "reference"
"""The column under which reward functions find the response that the data has."""


class Source(Protocol):
    """What the pipeline asks of a score source, which `build(config, context)` of a file in this folder returns."""

    def __call__(self, samples: Samples, /) -> Tensor:
        """One score for each of the B responses, [B]; higher is better. `columns_of(samples)` has the other columns."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a score source may need to know of the run."""

    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    reward_model: str
    """place of the run's reward model"""
    micro_batch_size: int
    held: FrozenOptions = field(default_factory=FrozenOptions)
    """how learned reward models are"""


@dataclass(frozen=True, slots=True)
class Part:
    """One source of several, under the name it is logged by."""

    name: str
    weight: float
    source: Source


@dataclass(frozen=True, slots=True)
class Sources:
    """Several sources as one score: the weighted sum, or the least weighted score of each response.

    The minimum is a response's weakest side: one that is helpful and unsafe scores as unsafe. (Llama 2, arXiv
    2307.09288, section 3.2.3, takes the safety score where it is low or the prompt is dangerous, else helpfulness.)
    A source of weight 0 is logged and counts for nothing.
    """

    parts: tuple[Part, ...]
    combine: Combine = "sum"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def __call__(self, samples: Samples) -> tuple[Tensor, dict[str, Tensor]]:
        """(scores [B], scores [B] of each source by its name, before its weight). They may not be finite."""
        each = {part.name: part.source(samples) for part in self.parts}
        counted = torch.stack([part.weight * each[part.name] for part in self.parts if part.weight != 0])
        scores = counted.sum(0) if self.combine == "sum" else counted.amin(0)
        return scores, each


def open_source(spec: str, context: Context) -> Source:
    """A score source by name, `name,option=value`, or the Python function `file.py:function` / `module:function`.

    What it says is checked: one finite number for each response, else a UserError that names the response.
    """
    source = open_unchecked(spec, context)

    def score(samples: Samples) -> Tensor:
        scores = source(samples)
        require_finite(scores, samples, spec)
        return scores

    return score


def open_unchecked(spec: str, context: Context) -> Source:
    """The same, whose numbers need not be finite."""
    name = spec.split(",")[0]
    plugin = f"python,function={spec}" if ":" in name or name.endswith(".py") else spec
    built: Source = plugins.build("rlhf.rewards", plugin, context)
    source = plugins.conforming(built, Source, spec)

    def score(samples: Samples) -> Tensor:
        scores = source(samples)
        if scores.shape != (len(samples.responses),):
            raise UserError(f"reward '{spec}': got {list(scores.shape)} scores, expected [{len(samples.responses)}]")
        return scores

    return score


def open_sources(specs: Sequence[str], context: Context, combine: Combine = "sum") -> Sources:
    """Sources by their specs, each with a weight before it or not: `learned`, `0.5*length,target=40`.

    Raises: UserError for a weight that is no number, an unknown source, or nothing that counts.
    """
    weighted = [split_weight(spec) for spec in specs]
    if not any(weight for weight, _ in weighted):
        raise UserError(f"reward: got {list(specs)}, expected at least one source whose weight is not 0")
    names = _numbered([_name(spec) for _, spec in weighted])
    parts = [
        Part(name, weight, open_unchecked(spec, context)) for name, (weight, spec) in zip(names, weighted, strict=True)
    ]
    return Sources(tuple(parts), combine)


def split_weight(spec: str) -> tuple[float, str]:
    """`0.7*learned,model=M` as (0.7, `learned,model=M`); without a weight it is 1.

    Raises: UserError for a weight that is no finite number, or nothing after it.
    """
    if "*" not in spec.split(",")[0]:  # an option may have one, in a regular expression
        return 1.0, spec
    text, _, source = spec.partition("*")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"reward '{spec}': got the weight '{text}', expected a number, as in 0.7*learned")
    if not source.strip():
        raise UserError(f"reward '{spec}': got nothing after the weight, expected a source, as in 0.7*learned")
    return weight, source.strip()


def _name(spec: str) -> str:
    """How a source is logged: its name, or the file and function without the folders."""
    name, options = plugins.parse_spec(spec)
    return PurePath(str(options.get("function", name)) if name == "python" else name).name


def _numbered(names: list[str]) -> list[str]:
    """The names, those that come twice with a number: learned#1, learned#2."""
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name}#{names[: i + 1].count(name)}" if name in twice else name for i, name in enumerate(names)]


def as_samples(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Samples:
    """Prompts and responses of a rollout as text."""
    template = Template(tokenizer)
    prompts = tuple(template.prompt_text(row.prompt) for row in rollout.rows)
    return Samples(prompts, tuple(map(template.response_text, rollout.response_tokens())), rollout)


def columns_of(samples: Samples) -> dict[str, list[Any]]:
    """What the rows have beside their prompts, by name: each column a list of B, None where a row has none.

    The response that the data has (a demonstration, the chosen side of a pair) is the column `reference`, unless the
    data has one of that name.
    """
    rows = samples.rollout.rows
    names = sorted({name for row in rows for name in row.columns})
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    if REFERENCE not in columns and any(row.response is not None for row in rows):
        columns[REFERENCE] = [row.response for row in rows]
    return columns


def require_finite(scores: Tensor, samples: Samples, source: str) -> None:
    """Raises: UserError that names the response whose score [B] is not finite."""
    for score, prompt, response in zip(scores.tolist(), samples.prompts, samples.responses, strict=True):
        if not math.isfinite(score):
            where = f"prompt {prompt[-60:]!r}, response {response[:60]!r}"
            raise UserError(f"reward '{source}': got {score} for {where}; expected a finite number")
