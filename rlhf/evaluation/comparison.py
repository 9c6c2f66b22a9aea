"""Several policies respond to the same prompts: the score, KL to the reference and length of each response."""

import gc
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf import console, rewards
from rlhf.distributed import collectives
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import (
    PromptSet,
    check_reward_spec,
    encode_prompts,
    policy_path,
    read_prompts,
    require_output,
)
from rlhf.evaluation.options import EvaluateConfig
from rlhf.maths import ops
from rlhf.models.policy import Policy
from rlhf.text.messages import format_prompt
from rlhf.types import Row, SampledRollout, length_groups


@dataclass(frozen=True, slots=True)
class Comparison:
    """The policies to compare, and what they are compared on."""

    options: EvaluateConfig
    policies: dict[str, str]
    """path of the model by the policy's name; the first policy is the baseline"""
    reference: str
    prompts: PromptSet
    """N prompts, each repeated K times"""


@dataclass(frozen=True, slots=True)
class Responses:
    """K responses of one policy to each of N prompts. Numbers are [N, K] float64."""

    texts: list[list[str]]
    tokens: list[list[int]]
    """[N K] ids without padding"""
    scores: Tensor
    kl: Tensor
    """log pi(y|x) - log ref(y|x): k1, nats per response, at the sampling temperature. log pi is that of the sampling
    pass: recomputed in another pass, rounding can make the mean negative"""
    ref_nll: Tensor
    """-log ref(y|x), nats per response, at the sampling temperature"""
    lengths: Tensor
    ended: Tensor
    selector: Tensor | None = None
    """scores by the source of --select-by"""


def check(options: EvaluateConfig) -> Comparison:
    """Check the options before any model is loaded. Raises: UserError."""
    lines = read_prompts(str(options.prompts))
    for spec in _score_sources(options):
        check_reward_spec(spec, [row for _, row in lines])
    prompts = different(lines)  # a prompt that counted twice would make the intervals too narrow
    if len(prompts) < len(lines):
        repeated = f"{len(lines) - len(prompts)} of {len(lines)} rows repeat an earlier one and are left out"
        console.say(f"--prompts {options.prompts}: {repeated}")
    if len(prompts) < 2:
        raise UserError(f"--prompts {options.prompts}: got {len(prompts)} prompts, expected two or more")
    policies = {_name(options.policies, i): policy_path(policy) for i, policy in enumerate(options.policies)}
    reference = policy_path(options.reference) if options.reference is not None else next(iter(policies.values()))
    prompt_set = encode_prompts(prompts, [reference, *policies.values()], options, options.samples)
    require_output(options.output, options.overwrite)
    return Comparison(options, policies, reference, prompt_set)


def different(lines: list[tuple[str, Row]]) -> list[tuple[str, Row]]:
    """The lines without those whose prompt, variables and columns are those of an earlier one."""
    first: dict[str, tuple[str, Row]] = {}
    for location, row in lines:
        key = json.dumps([format_prompt(row.prompt), row.variables, row.columns], sort_keys=True)
        first.setdefault(key, (location, row))
    return [*first.values()]


def _score_sources(options: EvaluateConfig) -> list[str]:
    """The judge, and the source that selects if there is one."""
    return [str(options.reward), *([] if options.select_by is None else [options.select_by])]


def _name(names: tuple[str, ...], number: int) -> str:
    """The name that the user typed; a policy that is named again gets a number."""
    before = names[:number].count(names[number])
    return f"{names[number]} ({before + 1})" if before else names[number]


def measure_all(comparison: Comparison) -> dict[str, Responses]:
    """The responses of every policy, by its name. Memory holds the reference, the score source and one policy.

    Raises: UserError for a model or a score source that fails; NonFiniteError.
    """
    prompts, options = comparison.prompts, comparison.options
    folder = None if options.output is None else Path(options.output) / rewards.ANSWERS
    specs = _score_sources(options)
    sources = [prompts.source(spec, options.micro_batch_size, folder).scoring() for spec in specs]
    reference = prompts.load(comparison.reference)
    measurement = _Measurement(comparison, reference, sources)
    responses = {}
    total = len(comparison.policies) * -(-len(comparison.prompts.rows) // collectives.world_size())
    with console.bar("responses", total) as bar:
        for name, model_path in comparison.policies.items():
            bar.advance(0, title=name)
            is_reference = Path(model_path).resolve() == Path(comparison.reference).resolve()
            policy = reference if is_reference else prompts.load(model_path)
            responses[name] = _measure(policy, name, measurement, bar)
            del policy
            gc.collect()  # before the next policy is loaded: modules with hooks are reference cycles
    rewards.say_counts(sources)
    return responses


def of_scored(comparison: Comparison, responses: dict[str, Responses]) -> tuple[Comparison, dict[str, Responses]]:
    """Those prompts to which every response has its scores; says how many are left out. Raises: UserError for fewer
    than two."""
    scores = [x for r in responses.values() for x in (r.scores, r.selector) if x is not None]
    scored = (torch.stack(scores) != rewards.NO_SCORE).all(2).all(0)
    rows, k = scored.nonzero().flatten().tolist(), comparison.options.samples
    if len(rows) == len(scored):
        return comparison, responses
    left_out = f"{len(scored) - len(rows)} of {len(scored)} prompts have a response without a score"
    if len(rows) < 2:
        raise UserError(f"--reward {comparison.options.reward}: {left_out}, expected two prompts or more without one")
    console.say(f"{left_out}, and are left out")
    each = [n * k + i for n in rows for i in range(k)]
    prompts = comparison.prompts
    prompts = replace(prompts, rows=tuple(prompts.rows[i] for i in each), ids=tuple(prompts.ids[i] for i in each))
    tensors = ("scores", "kl", "ref_nll", "lengths", "ended", "selector")

    def selected(r: Responses) -> Responses:
        numbers = {name: getattr(r, name)[rows] for name in tensors if getattr(r, name) is not None}
        return replace(r, texts=[r.texts[n] for n in rows], tokens=[r.tokens[i] for i in each], **numbers)

    return replace(comparison, prompts=prompts), {name: selected(r) for name, r in responses.items()}


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What every policy is measured with."""

    comparison: Comparison
    reference: Policy
    sources: list[rewards.Opened]


def _measure(policy: Policy, name: str, measurement: _Measurement, bar: console.Bar) -> Responses:
    o, tokenizer = measurement.comparison.options, measurement.comparison.prompts.tokenizer
    backend = measurement.comparison.prompts.backend()
    batches: list[tuple[list[str], list[list[int]], Tensor]] = []
    for prompts, uniforms in measurement.comparison.prompts.batches():
        rollout = backend(policy.lm, prompts, o, uniforms)
        backend.release()
        samples = rewards.as_samples(rollout, tokenizer)
        ref_logprobs = response_logprobs(measurement.reference, rollout, o.temperature, o.micro_batch_size)
        kl = kl_to(ref_logprobs, rollout)
        if not torch.isfinite(kl).all():
            row = int((~torch.isfinite(kl)).nonzero()[0])
            raise NonFiniteError(f"policy {name}: log-probs are not finite at prompt {samples.prompts[row][-60:]!r}")
        score, *selector = (source(samples) for source in measurement.sources)
        numbers = (score, kl, -ref_logprobs.sum(1), rollout.lengths, rollout.ended, *selector)
        columns = torch.stack([value.double().cpu() for value in numbers], dim=1)
        batches.append((list(samples.responses), rollout.response_tokens(), columns))
        bar.advance(len(rollout))
    batches = collectives.of_all_ranks(batches)
    texts = [text for batch_texts, _, _ in batches for text in batch_texts]
    tokens = [ids for _, batch_tokens, _ in batches for ids in batch_tokens]
    all_columns = torch.cat([columns for _, _, columns in batches])
    by_prompt = all_columns.reshape(-1, o.samples, all_columns.shape[1]).unbind(2)
    grouped_texts = [texts[i : i + o.samples] for i in range(0, len(texts), o.samples)]
    return Responses(grouped_texts, tokens, *by_prompt)


def kl_to(ref_logprobs: Tensor, rollout: SampledRollout) -> Tensor:
    """log pi(y|x) - log ref(y|x), k1, nats per response, [B] float64. ref_logprobs: [B, T] as of `response_logprobs`"""
    return (ops.zero_off_mask(rollout.sampled_logprobs.double(), rollout.mask) - ref_logprobs).sum(1)


@torch.no_grad()
def response_logprobs(policy: Policy, rollout: SampledRollout, temperature: float, micro_batch_size: int) -> Tensor:
    """Log-probs of the response tokens, [B, T] float64, 0 off the mask; rows of similar length together."""
    rollout = rollout.to("cpu")
    result = torch.zeros(rollout.mask.shape, dtype=torch.float64)
    for index in length_groups(rollout.sequences.lengths, micro_batch_size):
        micro_batch = rollout[index].trimmed()
        logprobs = policy(micro_batch.sequences, temperature)[0][:, micro_batch.prompt_ids.shape[1] :]
        result[index, : logprobs.shape[1]] = ops.zero_off_mask(logprobs.double().cpu(), micro_batch.mask)
    return result
