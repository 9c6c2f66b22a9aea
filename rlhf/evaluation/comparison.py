"""Several policies answer the same prompts: each response's score, KL to the reference, and length."""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf import console, rewards
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import (
    Questions,
    Respondents,
    check_reward,
    policy_place,
    questions,
    require_writable,
    respondents,
)
from rlhf.evaluation.options import EvaluateConfig
from rlhf.maths import ops
from rlhf.models.policy import Policy
from rlhf.text.prompt_file import read_prompts
from rlhf.types import Rollout, length_groups

RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for every policy, and where each of them is."""

    options: EvaluateConfig
    policies: dict[str, str]
    """place of the model by the policy's name; the first is the baseline"""
    reference: str
    questions: Questions
    """N prompts, each K times in a row"""


@dataclass(frozen=True, slots=True)
class Responses:
    """K responses of one policy to each of N prompts. Numbers are [N, K] float64."""

    texts: list[list[str]]
    tokens: list[list[int]]
    """[N K] ids without padding"""
    scores: Tensor
    kl: Tensor
    """log pi(y|x) - log ref(y|x): k1, nats per response, at the sampling temperature; log-probs of the sampling pass:
    with another pass's the mean can be negative by rounding"""
    ref_nll: Tensor
    """-log ref(y|x), nats per response, at the sampling temperature"""
    lengths: Tensor
    ended: Tensor


def check(options: EvaluateConfig) -> Setting:
    """Refuse, before a model is loaded, what cannot work.

    Raises: UserError.
    """
    check_reward(str(options.reward))
    prompts = read_prompts(str(options.prompts))
    if len(prompts) < 2:
        raise UserError(f"--prompts {options.prompts}: got {len(prompts)} prompts, expected two or more")
    policies = {_name(options.policies, i): policy_place(place) for i, place in enumerate(options.policies)}
    reference = policy_place(options.reference) if options.reference is not None else next(iter(policies.values()))
    asked = questions(prompts, [reference, *policies.values()], options, options.samples)
    _require_output(options)
    return Setting(options, policies, reference, asked)


def _require_output(options: EvaluateConfig) -> None:
    """Make the output directory. Raises: UserError if it has results already, or cannot be written in."""
    if options.output is None:
        return
    output = Path(options.output)
    try:
        there = (output / RESULTS).exists()
    except OSError:
        there = False  # what is wrong with the directory is said below
    if there and not options.overwrite:
        raise UserError(f"--output {output}: has a {RESULTS} already; name another, or add --overwrite")
    require_writable(output, f"--output {output}")


def _name(places: tuple[str, ...], number: int) -> str:
    """A policy is called what the user called it; one that is named again gets a number."""
    before = places[:number].count(places[number])
    return f"{places[number]} ({before + 1})" if before else places[number]


def measure_all(setting: Setting) -> dict[str, Responses]:
    """The responses of every policy, by its name. In memory: the reference, the score source, and one policy.

    Raises: UserError for a model or a score source that fails; NonFiniteError.
    """
    with_all = respondents(setting.questions)
    source = with_all.source(setting.options.micro_batch_size)
    reference = with_all.load(setting.reference)
    bench = _Bench(setting, with_all, reference, source)
    found = {}
    total = len(setting.policies) * len(setting.questions.rows)
    with console.bar("responses", total) as bar:
        for name, place in setting.policies.items():
            bar.advance(0, title=name)
            policy = reference if Path(place).resolve() == Path(setting.reference).resolve() else with_all.load(place)
            found[name] = _measure(policy, name, bench, bar)
            del policy
            gc.collect()  # before the next one is loaded: modules with hooks are circles
    return found


@dataclass(frozen=True, slots=True)
class _Bench:
    setting: Setting
    respondents: Respondents
    reference: Policy
    source: rewards.Source


def _measure(policy: Policy, name: str, bench: _Bench, bar: console.Bar) -> Responses:
    o, tokenizer = bench.setting.options, bench.setting.questions.tokenizer
    backend = bench.respondents.backend()
    texts: list[str] = []
    tokens: list[list[int]] = []
    columns = []
    for prompts, draw in bench.setting.questions.batches(bench.respondents.device):
        rollout = backend(policy.lm, prompts, o, draw)
        samples = rewards.as_samples(rollout, tokenizer)
        own = ops.zero_off_mask(rollout.sampled_logprobs.double(), rollout.mask)
        ref = _logprobs(bench.reference, rollout, o.temperature, o.micro_batch_size)
        kl = (own - ref).sum(1)
        if not torch.isfinite(kl).all():
            row = int((~torch.isfinite(kl)).nonzero()[0])
            raise NonFiniteError(f"policy {name}: log-probs are not finite at prompt {samples.prompts[row][-60:]!r}")
        numbers = (bench.source(samples), kl, -ref.sum(1), rollout.lengths, rollout.ended)
        columns.append(torch.stack([value.double().cpu() for value in numbers], dim=1))
        texts += samples.responses
        tokens += rollout.response_tokens()
        bar.advance(len(rollout))
    by_prompt = torch.cat(columns).reshape(-1, o.samples, len(numbers)).unbind(2)
    in_rows = [texts[i : i + o.samples] for i in range(0, len(texts), o.samples)]
    return Responses(in_rows, tokens, *by_prompt)


@torch.no_grad()
def _logprobs(policy: Policy, rollout: Rollout, temperature: float, micro_batch_size: int) -> Tensor:
    """Log-probs of the response tokens, [B, T] float64, 0 off the mask; rows of similar length together."""
    found = torch.zeros(rollout.mask.shape, dtype=torch.float64, device=rollout.mask.device)
    for index in length_groups(rollout.sequences.lengths, micro_batch_size):
        part = rollout[index].trimmed()
        logprobs = policy(part.sequences, temperature)[0][:, part.prompt_ids.shape[1] :]
        found[index, : logprobs.shape[1]] = ops.zero_off_mask(logprobs.double(), part.mask)
    return found
