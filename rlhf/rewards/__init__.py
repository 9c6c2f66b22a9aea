"""Score sources: one number for each whole response. One file each."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import plugins
from rlhf.config import UserError
from rlhf.text import Template
from rlhf.types import Rollout, Samples

Source = Callable[[Samples], Tensor]


@dataclass(frozen=True, slots=True)
class Context:
    """What a score source may need to know of the run."""

    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    reward_model: str
    """place of the run's reward model"""
    micro_batch_size: int


def open_source(spec: str, context: Context) -> Source:
    """A score source by name, `name,option=value`, or the Python function `file.py:function` / `module:function`.

    What it says is checked: one finite number for each response, else a UserError that names the response.
    """
    name = spec.split(",")[0]
    plugin = f"python,function={spec}" if ":" in name or name.endswith(".py") else spec
    source: Source = plugins.build("rlhf.rewards", plugin, context)

    def score(samples: Samples) -> Tensor:
        scores = source(samples)
        _refuse_bad(scores, samples, spec)
        return scores

    return score


def as_samples(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Samples:
    """Prompts and responses of a rollout as text."""
    template = Template(tokenizer)
    prompts = tuple(template.prompt_text(row.prompt) for row in rollout.rows)
    return Samples(prompts, tuple(map(template.response_text, rollout.response_tokens())), rollout)


def _refuse_bad(scores: Tensor, samples: Samples, source: str) -> None:
    """Raises: UserError if `scores` is not [B], or one of them is not finite."""
    if scores.shape != (len(samples.responses),):
        raise UserError(f"reward '{source}': got {list(scores.shape)} scores, expected [{len(samples.responses)}]")
    for score, prompt, response in zip(scores.tolist(), samples.prompts, samples.responses, strict=True):
        if not math.isfinite(score):
            where = f"prompt {prompt[-60:]!r}, response {response[:60]!r}"
            raise UserError(f"reward '{source}': got {score} for {where}; expected a finite number")
