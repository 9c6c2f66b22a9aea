"""The first half of an iteration: sample responses, score them, and scale the scores."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from data.batches import prompt_batch
from data.dataset import PromptDataset
from data.prepare.encode import Prompt
from rlhf.adapters import Adapter
from rlhf.config.options import SamplingOptions
from rlhf.distributed import collectives
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.generation import Backend
from rlhf.maths import ops
from rlhf.maths.uniforms import uniforms
from rlhf.models.policy import Policy
from rlhf.models.scalar import state_values
from rlhf.rewards import NO_SCORE, Sources, as_samples
from rlhf.types import Prompts, SampledRollout, ScoredRollout, Sequences, length_groups, to_device
from step3_ppo.config import ScoreOptions, Step3Config


@dataclass(frozen=True, slots=True)
class Reference:
    """The policy that the KL is measured from: a frozen model, or the actor with this adapter disabled."""

    source: FrozenEngine | Adapter

    @contextlib.contextmanager
    def inference(self, actor: Engine) -> Iterator[Policy]:
        """The reference model in eval mode, without gradients."""
        if isinstance(self.source, FrozenEngine):
            with self.source.inference() as reference:
                yield reference
            return
        # Disable the adapter first: in `inference` a waiting rank runs dummy passes of the same model.
        with self.source.disabled(actor.module.lm), actor.inference() as reference:
            yield reference


@dataclass(frozen=True, slots=True)
class Scorer:
    """Everything that scores a finished response."""

    reference: Reference
    sources: Sources
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingOptions
    batch_size: int
    """rows of one pass"""
    missing_eos_penalty: float | None
    rescore: bool = True
    """whether a pass of its own computes the old log-probs"""


def prompts_and_uniforms(
    prompts: PromptDataset[Prompt], indices: Sequence[int], config: Step3Config, pad_token_id: int, number: int
) -> tuple[Prompts, Tensor]:
    """The prompt at each of `indices`, with repetitions, and the random numbers [B, T] of its response.

    `number` is that of the rollout: every response of every rollout has a random stream of its own.
    """
    repetitions: Counter[int] = Counter()
    keys = []
    for index in indices:
        keys.append((config.seed, number, index, repetitions[index]))
        repetitions[index] += 1
    return prompt_batch([prompts[i] for i in indices], pad_token_id), uniforms(keys, config.response_length)


def generate(
    policy_weights: AbstractContextManager[Policy],
    backend: Backend,
    prompts: Prompts,
    uniforms: Tensor,
    config: Step3Config,
) -> SampledRollout:
    """Responses y ~ pi_old(. | x) to `prompts`, `rollout_batch_size` at a time, or all at once if the backend
    `takes_all`.

    policy_weights: `inference()` of the policy's engine, or of a `Reference`. uniforms: [B, T] in [0, 1), the only
    randomness. All tensors are on the CPU, those of the result too.
    """
    size = len(prompts) if backend.takes_all else config.rollout_batch_size
    with policy_weights as policy:
        batches = [
            backend(policy.lm, prompts[slice(i, i + size)], config, uniforms[i : i + size])
            for i in range(0, len(prompts), size)
        ]
    backend.release()
    prompt, response = prompts.ids.shape[1], max(batch.response_ids.shape[1] for batch in batches)
    return SampledRollout.concatenated([batch.to("cpu").widened(prompt, response) for batch in batches])


@torch.no_grad()
def score(
    rollout: SampledRollout, actor: Engine, critic: Engine | None, scorer: Scorer, group: int = 1
) -> ScoredRollout:
    """The rollout with scores, old and reference log-probs, and the critic's values, on the CPU.

    Old log-probs are those of the training forward, not of sampling: in bf16 the two differ (std 5e-2),
    and the first ratio of PPO must be 1. Without `rescore` they are those of sampling, until the update has its own.
    If the critic is the actor's engine, one pass gives both. group: neighbouring responses to one prompt
    """

    def logprobs(policy: Policy) -> Callable[[Sequences, int], Tensor]:
        return lambda sequences, prompt: policy(sequences, scorer.sampling.temperature).logprobs[:, prompt:]

    def logprobs_and_values(sequences: Sequences, prompt: int) -> Tensor:
        output = policy(sequences, scorer.sampling.temperature)
        assert output.values is not None
        return torch.stack([output.logprobs[:, prompt:], state_values(output.values, prompt)])

    old, values = rollout.sampled_logprobs, None
    if scorer.rescore:
        with actor.inference() as policy:
            if critic is actor:
                old, values = per_token(rollout, logprobs_and_values, scorer.batch_size)
            else:
                old = per_token(rollout, logprobs(policy), scorer.batch_size)
    with scorer.reference.inference(actor) as reference:
        ref = per_token(rollout, logprobs(reference), scorer.batch_size)
    if critic is not None and critic is not actor:
        with critic.inference() as model:
            values = per_token(rollout, lambda rows, prompt: state_values(model(rows), prompt), scorer.batch_size)
    scores, source_scores = combined_scores(rollout, scorer, group)
    sampled = {field.name: getattr(rollout, field.name) for field in fields(SampledRollout)}
    numbers = {"logprobs": old, "ref_logprobs": ref, "scores": scores, "source_scores": source_scores, "values": values}
    on_cpu: dict[str, Any] = {name: x if x is None else x.cpu() for name, x in numbers.items()}
    return ScoredRollout(**sampled, **on_cpu)


def combined_scores(rollout: SampledRollout, scorer: Scorer, group: int = 1) -> tuple[Tensor, Tensor]:
    """The scores [B], less the penalty of a missing EOS, and the scores of each of the N sources [B, N]."""
    # A source may be random, or slow: ranks that share a model must learn from the same scores.
    scores, by_source = collectives.broadcast_in_replica(scorer.sources(as_samples(rollout, scorer.tokenizer)))
    if scorer.missing_eos_penalty is not None:
        scores = scores - scorer.missing_eos_penalty * (~rollout.ended).float()
    return _without_gaps(scores, group), torch.stack(list(by_source.values()), dim=1)


def _without_gaps(scores: Tensor, group: int) -> Tensor:
    """The scores [B], in which one that is missing is the mean of its group, whose baseline it leaves as it is; for a
    group without any it is the mean of all ranks' responses, and without one of those 0."""
    groups = scores.double().view(-1, group)
    missing = groups == NO_SCORE
    counts, sums = (~missing).sum(1), groups.masked_fill(missing, 0.0).sum(1)
    count, total = collectives.sum_over_ranks(torch.stack([counts.sum(), sums.sum()])).tolist()
    means = torch.where(counts > 0, sums / counts, total / max(count, 1.0))
    return torch.where(missing, means[:, None], groups).view(-1).to(scores.dtype)


def nonfinite(rollout: ScoredRollout, source_scores: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """What is not a finite number, such as `score is nan`, with the rows [b] of this rank that have it.

    source_scores: [B] of each reward source by its name; a source is named where the score is not finite.
    """
    finite = rollout.scores.isfinite()
    numbers = {"score": rollout.scores}
    numbers |= {f"score of {name}": scores.masked_fill(finite, 0.0) for name, scores in source_scores.items()}
    for name in ("sampled_logprobs", "logprobs", "ref_logprobs", "values"):
        tokens = getattr(rollout, name)
        if tokens is not None:
            numbers[name] = tokens.masked_fill(~rollout.mask, 0.0).sum(1)
    problems = {}
    for name, values in numbers.items():
        rows = (~values.isfinite()).nonzero().squeeze(1).tolist()
        if rows:
            problems[f"{name} is {values[rows[0]].item()}"] = rows
    return problems


def per_token(rollout: SampledRollout, forward: Callable[[Sequences, int], Tensor], batch_size: int) -> Tensor:
    """`forward(sequences, P)` for every response token, [B, T] on the device of its results, 0 off the mask; rows of
    similar length together.

    If `forward` gives K numbers for each token, [K, b, t]: [K, B, T].
    """
    groups = length_groups(rollout.sequences.lengths, batch_size)
    columns = []
    for rows in groups:
        micro = rollout[rows].trimmed()
        values = forward(micro.sequences, micro.prompt_ids.shape[1]).float()
        values = values.masked_fill(to_device(~micro.mask, values.device), 0.0)
        columns.append(pad(values, (0, rollout.mask.shape[1] - values.shape[-1])))
    by_group = torch.cat(columns, dim=-2)
    return by_group[..., to_device(torch.cat(groups).argsort(), by_group.device), :]


class ScoreScaling:
    """Scores divided by the running standard deviation of all scores of the run, optionally centred on their mean.

        score' = clip((score [- mean]) / std, -score_clip, score_clip)

    mean, std (biased) over the responses of all ranks and iterations so far, this one's included. TRL's
    use_score_scaling, use_score_norm and score_clip; Engstrom et al. 2020 (arXiv 2005.12729) on why.
    """

    def __init__(self, options: ScoreOptions) -> None:
        self._options = options
        self._moments = torch.zeros(3, dtype=torch.float64)

    def __call__(self, scores: Tensor) -> Tensor:
        """The scores [B] for the algorithm; updates the running statistics. All ranks call this together."""
        c = self._options
        if c.use_score_scaling:
            mask = torch.ones_like(scores, dtype=torch.bool)
            self._moments += collectives.sum_over_ranks(ops.moments(scores, mask)).cpu()
            mean, var = ops.mean_var(self._moments)
            if var > 0:  # otherwise all scores so far are equal, and there is nothing to divide by
                scores = ((scores.double() - (mean if c.use_score_norm else 0.0)) / var.sqrt()).to(scores.dtype)
        return scores if c.score_clip is None else scores.clamp(-c.score_clip, c.score_clip)

    def state_dict(self) -> dict[str, list[float]]:
        """Number, sum and sum of squares of the scores so far."""
        return {"moments": self._moments.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self._moments = torch.tensor(state["moments"], dtype=torch.float64)
