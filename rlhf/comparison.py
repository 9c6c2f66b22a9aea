"""Several policies answer the same prompts: each response's score, KL to the reference, and length."""

import gc
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from rlhf import dist, ops, plugins, rewards
from rlhf.checkpoint import model_place
from rlhf.config import UserError
from rlhf.engine import NonFiniteError, compute_dtype
from rlhf.evaluate import EvaluateConfig
from rlhf.generation import loop
from rlhf.models.load import context_length, load_causal_lm, load_config
from rlhf.models.policy import Policy
from rlhf.names import resolve
from rlhf.options import EngineOptions
from rlhf.prompt_file import read_prompts
from rlhf.text import Template, load_tokenizer, prepare_tokenizer, same_ids
from rlhf.types import Prompts, Rollout, Row, length_groups

RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for every policy, and where each of them is. Every prompt stands K times in a row."""

    options: EvaluateConfig
    policies: dict[str, str]
    """place of the model by the policy's name; the first is the baseline"""
    reference: str
    tokenizer: PreTrainedTokenizerBase
    rows: tuple[Row, ...]
    """[N K]"""
    ids: tuple[list[int], ...]
    """[N K] of the rendered prompts"""


@dataclass(frozen=True, slots=True)
class Responses:
    """K responses of one policy to each of N prompts. Numbers are [N, K] float64."""

    texts: list[list[str]]
    tokens: list[list[int]]
    """[N K] ids without padding"""
    scores: Tensor
    kl: Tensor
    """log pi(y|x) - log ref(y|x): k1, nats per response, at the sampling temperature"""
    ref_nll: Tensor
    """-log ref(y|x), nats per response, at the sampling temperature"""
    lengths: Tensor
    ended: Tensor


def check(options: EvaluateConfig) -> Setting:
    """Refuse, before a model is loaded, what cannot work.

    Raises: UserError.
    """
    compute_dtype(EngineOptions(dtype=options.dtype), dist.local_device())
    _check_reward(str(options.reward))
    prompts = read_prompts(str(options.prompts))
    if len(prompts) < 2:
        raise UserError(f"--prompts {options.prompts}: got {len(prompts)} prompts, expected two or more")
    policies = {_name(options.policies, i): _place(place) for i, place in enumerate(options.policies)}
    reference = _place(options.reference) if options.reference is not None else next(iter(policies.values()))
    tokenizer = _one_tokenizer([reference, *policies.values()], options.chat_template)
    ids = _encoded(prompts, tokenizer)
    for place in (reference, *policies.values()):
        _require_room(prompts, ids, place, options.response_length)
    _require_output(options)
    repeated = [i for i in range(len(prompts)) for _ in range(options.samples)]
    rows, ids = tuple(prompts[i][1] for i in repeated), [ids[i] for i in repeated]
    return Setting(options, policies, reference, tokenizer, rows, tuple(ids))


def _require_output(options: EvaluateConfig) -> None:
    """Make the output directory. Raises: UserError if it has results already, or cannot be written in."""
    if options.output is None:
        return
    output = Path(options.output)
    try:
        if (output / RESULTS).exists() and not options.overwrite:
            raise UserError(f"--output {output}: has a {RESULTS} already; name another, or add --overwrite")
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise UserError(f"--output {output}: cannot write there ({error.strerror}); name another directory") from None


def _check_reward(spec: str) -> None:
    """Raises: UserError if it is the run's reward model, of which there is none here."""
    name, _, _ = spec.partition(",")
    if name == "learned" and plugins.parse_spec(spec)[1].get("model") is None:
        raise UserError("--reward learned: of which reward model? write --reward learned,model=DIR")


def _name(places: tuple[str, ...], number: int) -> str:
    """A policy is called what the user called it; one that is named again gets a number."""
    before = places[:number].count(places[number])
    return f"{places[number]} ({before + 1})" if before else places[number]


def _place(place: str) -> str:
    return resolve(model_place(place, "actor", "model"))


def _one_tokenizer(places: list[str], chat_template: str) -> PreTrainedTokenizerBase:
    """The tokenizer that all have. Raises: UserError if one writes other ids: no KL between them would have a sense."""
    first, *others = dict.fromkeys(places)
    tokenizer = prepare_tokenizer(load_tokenizer(first), chat_template)
    for place in others:
        if not same_ids(tokenizer, prepare_tokenizer(load_tokenizer(place), chat_template)):
            raise UserError(
                f"policy '{place}': its tokenizer or chat template gives other ids than that of '{first}'; expected "
                "one family; if only the template differs, name one for all with --chat-template"
            )
    return tokenizer


def _encoded(prompts: list[tuple[str, Row]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    template = Template(tokenizer)
    ids = []
    for where, row in prompts:
        try:
            ids.append(template.prompt_ids(row.prompt))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return ids


def _require_room(prompts: list[tuple[str, Row]], ids: list[list[int]], place: str, response_length: int) -> None:
    """Raises: UserError if a prompt and its response do not fit the model's context; cut, it would be another one."""
    limit = context_length(load_config(place))
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    if len(ids[longest]) + response_length > limit:
        raise UserError(
            f"{prompts[longest][0]}: the prompt has {len(ids[longest])} tokens, with --response-length "
            f"{response_length} more than the context of '{place}', {limit}; leave it out, or lower --response-length"
        )


def measure_all(setting: Setting) -> dict[str, Responses]:
    """The responses of every policy, by its name. In memory: the reference, the score source, and one policy.

    Raises: UserError for a model or a score source that fails; NonFiniteError.
    """
    o, tokenizer = setting.options, setting.tokenizer
    device = dist.local_device()
    dtype = compute_dtype(EngineOptions(dtype=o.dtype), device)
    context = rewards.Context(
        tokenizer=tokenizer, device=device, dtype=dtype, reward_model="", micro_batch_size=o.micro_batch_size
    )
    source = rewards.open_source(str(o.reward), context)

    def load(place: str) -> Policy:
        return Policy(load_causal_lm(place, dtype, len(tokenizer), o.seed)).to(device).requires_grad_(False)

    reference = load(setting.reference)
    bench = _Bench(setting, reference, source, device)
    found = {}
    total = len(setting.policies) * len(setting.rows)
    with tqdm(total=total, file=sys.stderr, disable=not sys.stderr.isatty(), unit="response") as bar:
        for name, place in setting.policies.items():
            bar.set_description(name)
            policy = reference if Path(place).resolve() == Path(setting.reference).resolve() else load(place)
            found[name] = _measure(policy, name, bench, bar)
            del policy
            gc.collect()  # before the next one is loaded: modules with hooks are circles
    return found


@dataclass(frozen=True, slots=True)
class _Bench:
    setting: Setting
    reference: Policy
    source: rewards.Source
    device: torch.device

    def batches(self) -> Iterator[tuple[Prompts, torch.Generator]]:
        """The prompts, left-padded, and the random stream of each batch: the same ones for every policy."""
        o, tokenizer = self.setting.options, self.setting.tokenizer
        for start in range(0, len(self.setting.rows), o.rollout_batch_size):
            here = slice(start, start + o.rollout_batch_size)
            draw = torch.Generator(self.device).manual_seed(o.seed * 1_000_003 + start)
            prompts = _left_padded(self.setting.ids[here], self.setting.rows[here], tokenizer.pad_token_id)
            yield prompts.to(self.device), draw


def _left_padded(ids: tuple[list[int], ...], rows: tuple[Row, ...], pad_id: int) -> Prompts:
    width = max(map(len, ids))
    padded = torch.tensor([[pad_id] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids])
    return Prompts(padded, mask, rows)


def _measure(policy: Policy, name: str, bench: _Bench, bar: tqdm) -> Responses:
    o, tokenizer = bench.setting.options, bench.setting.tokenizer
    backend = loop.build(loop.Config(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    texts: list[str] = []
    tokens: list[list[int]] = []
    columns = []
    for prompts, draw in bench.batches():
        rollout = backend(policy.lm, prompts, o, draw)
        samples = rewards.as_samples(rollout, tokenizer)
        own, ref = (_logprobs(p, rollout, o.temperature, o.micro_batch_size) for p in (policy, bench.reference))
        kl = (own - ref).sum(1)
        if not torch.isfinite(kl).all():
            row = int((~torch.isfinite(kl)).nonzero()[0])
            raise NonFiniteError(f"policy {name}: log-probs are not finite at prompt {samples.prompts[row][-60:]!r}")
        numbers = (bench.source(samples), kl, -ref.sum(1), rollout.lengths, rollout.ended)
        columns.append(torch.stack([value.double().cpu() for value in numbers], dim=1))
        texts += samples.responses
        tokens += rollout.response_tokens()
        bar.update(len(rollout))
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
