"""One response at a time, token by token: the text as it is written, and its score and KL at the end.

The sampler is that of step 3 (rlhf/generation/loop.py), so that people vote on what training would sample.
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from rlhf import rewards
from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.distributed import collectives
from rlhf.engine.precision import compute_dtype
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import common_tokenizer, left_padded
from rlhf.evaluation.comparison import kl_to, response_logprobs
from rlhf.generation import BackendOptions
from rlhf.generation.loop import refuse_recurrent, sampled, steps
from rlhf.maths.uniforms import EVALUATION, uniforms
from rlhf.models.ends import end_ids
from rlhf.models.load import context_length, load_causal_lm
from rlhf.models.policy import Policy
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.types import Message, Row, SampledRollout


class TooLong(UserError):
    """The dialogue leaves no room for a response in the model's context."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is sampled."""

    temperature: float
    """0: greedy"""
    response_length: int
    """tokens at most, EOS included"""
    key: tuple[int, ...]
    """seed of the response's random numbers"""

    @property
    def options(self) -> SamplingOptions:
        """Log-probs of a greedy response are those at temperature 1."""
        return SamplingOptions(temperature=self.temperature or 1.0, response_length=self.response_length)


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response."""

    text: str
    ended: bool
    """it ended with EOS"""
    rollout: SampledRollout
    temperature: float
    """of the log-probs"""

    @property
    def tokens(self) -> int:
        return int(self.rollout.lengths.sum())


@dataclass(frozen=True, slots=True)
class Measures:
    """The score of a response, and its KL in nats: log pi(y|x) - log ref(y|x). None: not measured."""

    score: float | None
    kl: float | None


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models with one tokenizer, on one device."""

    tokenizer: PreTrainedTokenizerBase
    policies: Mapping[str, Policy]
    """by name"""
    paths: Mapping[str, str]
    reference: Policy | None
    source: rewards.Source | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """one response at a time: a pass changes a model's layers while it decodes"""

    @property
    def template(self) -> Template:
        return Template(self.tokenizer)

    def measure(self, response: Response) -> Measures:
        """The score and KL of a response, as `rlhf evaluate` computes them. Raises: UserError of the score source."""
        score = kl = None
        with self.lock:
            if self.source is not None:
                score = self.source(rewards.as_samples(response.rollout, self.tokenizer))[0].item()
            if self.reference is not None:
                ref_logprobs = response_logprobs(self.reference, response.rollout, response.temperature, 1)
                kl = kl_to(ref_logprobs, response.rollout)[0].item()
        return Measures(score, kl)


def load_models(
    paths: Mapping[str, str], reference: str | None, scoring: rewards.Scoring | None, chat_template: str, dtype: str
) -> Models:
    """Load policies by their paths, the reference and the score sources; a path that comes twice is loaded once.

    Raises: UserError if a model cannot be loaded, or their tokenizers differ.
    """
    device = collectives.local_device()
    compute = compute_dtype(EngineOptions.model_validate({"dtype": dtype}), device)
    all_paths = [*paths.values(), *([] if reference is None else [reference])]
    tokenizer = common_tokenizer(all_paths, chat_template)
    by_path: dict[str, Policy] = {}
    for path in dict.fromkeys(all_paths):
        lm = load_causal_lm(path, compute, id_count(tokenizer))
        refuse_recurrent(lm)
        by_path[path] = Policy(lm).to(device).requires_grad_(False)
    context = rewards.Context(tokenizer, device, compute, "", 1)
    return Models(
        tokenizer,
        {name: by_path[path] for name, path in paths.items()},
        paths,
        None if reference is None else by_path[reference],
        None if scoring is None else scoring.open(context),
    )


class Generation:
    """A response that is sampled while it is iterated over: pieces of its text, then `response`."""

    def __init__(self, models: Models, policy: str, messages: Sequence[Message], sampling: Sampling) -> None:
        """Raises: TooLong; UserError if the template cannot render the messages."""
        self.policy, self.messages = policy, tuple(messages)
        self.response: Response | None = None
        self._models = models
        lm = models.policies[policy].lm
        ids = models.template.prompt_ids(messages)
        space = context_length(lm.config) - len(ids)
        if space < 1:
            raise TooLong(
                f"policy '{policy}': the dialogue has {len(ids)} tokens, and the context of the model is "
                f"{context_length(lm.config)} tokens with the response; start a new dialogue"
            )
        length = min(sampling.response_length, space)
        self._greedy = sampling.temperature == 0
        self.sampling = Sampling(sampling.temperature, length, sampling.key)
        self._prompts = left_padded((ids,), (Row(self.messages),), models.tokenizer.pad_token_id)

    def __iter__(self) -> Generator[str, None, None]:
        """Pieces of the text; joined they are `response.text`. Only whole characters, no special tokens."""
        m, sampling = self._models, self.sampling
        lm, template = m.policies[self.policy].lm, m.template
        uniform = None if self._greedy else uniforms([sampling.key], sampling.response_length, EVALUATION)
        config = BackendOptions(eos_token_id=m.tokenizer.eos_token_id, pad_token_id=m.tokenizer.pad_token_id)
        ends = end_ids(lm, m.tokenizer.eos_token_id)
        ids: list[int] = []
        logprobs: list[float] = []
        shown = ""
        with m.lock:
            sampler = steps(lm, self._prompts, sampling.options, uniform, config)
            try:
                for step in sampler:
                    ids.append(int(step.tokens))
                    logprobs.append(float(step.logprobs))
                    settled = template.settled_text(ids[:-1] if ids[-1] in ends else ids)
                    if len(settled) > len(shown):
                        yield settled[len(shown) :]
                        shown = settled
                    if ids[-1] in ends:
                        break
            finally:
                sampler.close()  # restores the layers if the response was cut
        text = template.response_text(ids[:-1] if ids[-1] in ends else ids)
        rollout = self._rollout(ids, logprobs, ends)
        self.response = Response(text, bool(rollout.ended), rollout, sampling.options.temperature)
        if len(text) > len(shown):
            yield text[len(shown) :]

    def _rollout(self, ids: list[int], logprobs: list[float], ends: Sequence[int]) -> SampledRollout:
        tokens = torch.tensor([ids])
        return sampled(self._prompts, tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([logprobs]), ends)

    def finish(self) -> Response:
        """The whole response; what has not been sampled yet is sampled now."""
        if self.response is None:
            for _ in self:
                pass
        assert self.response is not None
        return self.response
