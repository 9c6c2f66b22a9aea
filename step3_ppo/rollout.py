"""The first half of an iteration: sample responses, then score them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.config.options import SamplingOptions
from rlhf.distributed import collectives
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.generation import Backend
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel, state_values
from rlhf.rewards import Sources, as_samples
from rlhf.types import Prompts, Rollout, Sequences, length_groups


@dataclass(frozen=True, slots=True)
class Reference:
    """The policy that the KL is measured from: a frozen model, or (None) the actor with its adapter off."""

    frozen: FrozenEngine | None

    @contextlib.contextmanager
    def of(self, actor: Engine) -> Iterator[Any]:
        """The reference, ready to be asked."""
        off = contextlib.nullcontext() if self.frozen is not None else actor.module.lm.disable_adapter()
        # In this order: a rank that waits for others inside `inference` asks what they ask.
        with off, (self.frozen or actor).inference() as reference:
            yield reference


@dataclass(frozen=True, slots=True)
class Scorer:
    """Everything that looks at a finished response."""

    reference: Reference
    sources: Sources
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingOptions
    micro_batch_size: int
    missing_eos_penalty: float | None


def generate(
    actor: Engine[Policy],
    backend: Backend,
    prompts: Prompts,
    sampling: SamplingOptions,
    draws: Tensor,
    batch_size: int,
) -> Rollout:
    """Responses to `prompts`, y ~ pi_old(. | x), at most `batch_size` at once, or all if the backend `takes_all`;
    `draws` as the backend has them."""
    if backend.takes_all:
        batch_size = len(prompts)
    with actor.inference() as policy:
        parts = [
            backend(policy.lm, prompts[slice(i, i + batch_size)], sampling, draws[i : i + batch_size])
            for i in range(0, len(prompts), batch_size)
        ]
    width = max(part.response_ids.shape[1] for part in parts)
    return Rollout(
        prompt_ids=prompts.ids,
        prompt_mask=prompts.mask,
        response_ids=torch.cat([_widened(part.response_ids, width) for part in parts]),
        mask=torch.cat([_widened(part.mask, width) for part in parts]),
        sampled_logprobs=torch.cat([_widened(part.sampled_logprobs, width) for part in parts]),
        ended=torch.cat([part.ended for part in parts]),
        rows=prompts.rows,
    )


def _widened(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))


@torch.no_grad()
def score(rollout: Rollout, actor: Engine[Policy], critic: Engine[ScalarModel] | None, scorer: Scorer) -> Rollout:
    """The rollout with scores, old and reference log-probs, and the critic's values.

    Old log-probs are those of the training forward, not of sampling: in bf16 the two differ (std 5e-2),
    and the first ratio of PPO must be 1.
    """

    def logprobs(policy: Policy) -> Callable[[Sequences, int], Tensor]:
        return lambda sequences, prompt: policy(sequences, scorer.sampling.temperature)[0][:, prompt:]

    with actor.inference() as policy:
        old = per_token(rollout, logprobs(policy), scorer.micro_batch_size)
    with scorer.reference.of(actor) as reference:
        ref = per_token(rollout, logprobs(reference), scorer.micro_batch_size)
    values = None
    if critic is not None:
        with critic.inference() as model:
            values = per_token(rollout, critic_values(model), scorer.micro_batch_size)
    # A source may be random, or dear: ranks that share a model must not learn from different answers.
    scores, by_source = collectives.broadcast_in_share(scorer.sources(as_samples(rollout, scorer.tokenizer)))
    scores = scores.to(old.device)
    source_scores = torch.stack([each.to(old.device) for each in by_source.values()], dim=1)
    if scorer.missing_eos_penalty is not None:
        scores = scores - scorer.missing_eos_penalty * (~rollout.ended).float()
    return replace(rollout, logprobs=old, ref_logprobs=ref, values=values, scores=scores, source_scores=source_scores)


def by_source(scorer: Scorer, rollout: Rollout) -> dict[str, Tensor]:
    """What each reward source says of a scored rollout, by its name. [B] each"""
    assert rollout.source_scores is not None
    return dict(zip(scorer.sources.names, rollout.source_scores.unbind(1), strict=True))


def flaws(rollout: Rollout, sources: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Of each number of a scored rollout that is not finite: `score is nan`, and in which rows of this rank.

    sources: what each reward source says, by its name; named where the score is not finite. [B] each
    """
    assert rollout.scores is not None
    sound = rollout.scores.isfinite()
    numbers = {"score": rollout.scores}
    numbers |= {f"score of {name}": scores.masked_fill(sound, 0.0) for name, scores in sources.items()}
    for name in ("sampled_logprobs", "logprobs", "ref_logprobs", "values"):
        tokens = getattr(rollout, name)
        if tokens is not None:
            numbers[name] = tokens.masked_fill(~rollout.mask, 0.0).sum(1)
    found = {}
    for name, values in numbers.items():
        rows = (~values.isfinite()).nonzero().squeeze(1).tolist()
        if rows:
            found[f"{name} is {values[rows[0]].item()}"] = rows
    return found


def critic_values(model: ScalarModel | Engine) -> Callable[[Sequences, int], Tensor]:
    """Values [B, T] of the states in which the response tokens were chosen."""
    return lambda sequences, prompt: state_values(model(sequences), prompt)


def per_token(rollout: Rollout, forward: Callable[[Sequences, int], Tensor], micro_batch_size: int) -> Tensor:
    """`forward(sequences, P)` for every response token, [B, T], 0 off the mask; rows of similar length together."""
    result = torch.zeros(rollout.mask.shape, device=rollout.mask.device)
    for index in length_groups(rollout.sequences.lengths, micro_batch_size):
        part = rollout[index].trimmed()
        values = forward(part.sequences, part.prompt_ids.shape[1])
        result[index, : values.shape[1]] = values.float().masked_fill(~part.mask, 0.0)
    return result
