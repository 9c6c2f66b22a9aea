"""One response at a time, token by token: the text as it is written, and its score at the end.

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
from rlhf.evaluation.batch_generation import common_tokenizer
from rlhf.generation import BackendOptions
from rlhf.generation.loop import refuse_recurrent, sampled, steps
from rlhf.maths.uniforms import EVALUATION, uniforms
from rlhf.models.ends import end_ids
from rlhf.models.load import Loading, context_length, load_causal_lm
from rlhf.models.policy import Policy
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.types import Message, Prompts, Row, SampledRollout


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is sampled."""

    temperature: float
    """0: greedy"""
    response_length: int
    """tokens at most, EOS included"""
    key: tuple[int, ...]
    """seed of the response's random numbers"""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response."""

    text: str
    ended: bool
    """it ended with EOS"""
    rollout: SampledRollout

    @property
    def tokens(self) -> int:
        return int(self.rollout.lengths.sum())


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models with one tokenizer, on one device."""

    tokenizer: PreTrainedTokenizerBase
    policies: Mapping[str, Policy]
    """by name"""
    paths: Mapping[str, str]
    source: rewards.Source | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """one response at a time: a pass changes a model's layers while it decodes"""

    @property
    def template(self) -> Template:
        return Template(self.tokenizer)

    def score(self, response: Response) -> float | None:
        """The score of a response, as `rlhf evaluate` computes it; None without a score source.

        Raises: UserError of the score source.
        """
        if self.source is None:
            return None
        with self.lock:
            return self.source(rewards.as_samples(response.rollout, self.tokenizer))[0].item()


def load_models(paths: Mapping[str, str], reward: str | None, chat_template: str, dtype: str) -> Models:
    """Load policies by their paths, and the score source.

    Raises: UserError if a model cannot be loaded, or their tokenizers differ.
    """
    device = collectives.local_device()
    compute = compute_dtype(EngineOptions.model_validate({"dtype": dtype}), device)
    tokenizer = common_tokenizer([*paths.values()], chat_template)
    policies = {}
    for name, path in paths.items():
        lm = load_causal_lm(path, compute, id_count(tokenizer), Loading(virtual_tokens=True))
        refuse_recurrent(lm)
        policies[name] = Policy(lm).to(device).requires_grad_(False)
    context = rewards.Context(tokenizer, device, compute, "", 1)
    return Models(tokenizer, policies, paths, None if reward is None else rewards.open_source(reward, context))


class Generation:
    """A response that is sampled while it is iterated over: pieces of its text, then `response`."""

    def __init__(self, models: Models, policy: str, messages: Sequence[Message], sampling: Sampling) -> None:
        """Raises: UserError if the template cannot render the messages, or they leave no room for a response in the
        model's context."""
        self.policy, self.messages = policy, tuple(messages)
        self.response: Response | None = None
        self._models = models
        lm = models.policies[policy].lm
        ids = models.template.prompt_ids(messages)
        space = context_length(lm.config) - len(ids)
        if space < 1:
            raise UserError(
                f"policy '{policy}': the dialogue has {len(ids)} tokens, and the context of the model is "
                f"{context_length(lm.config)} tokens with the response; start a new dialogue"
            )
        self.sampling = Sampling(sampling.temperature, min(sampling.response_length, space), sampling.key)
        self._prompts = Prompts.left_padded((ids,), (Row(self.messages),), models.tokenizer.pad_token_id)

    def __iter__(self) -> Generator[str, None, None]:
        """Pieces of the text; joined they are `response.text`. Only whole characters, no special tokens."""
        m, sampling = self._models, self.sampling
        lm, template = m.policies[self.policy].lm, m.template
        length, greedy = sampling.response_length, sampling.temperature == 0
        options = SamplingOptions(temperature=sampling.temperature or 1.0, response_length=length)
        uniform = None if greedy else uniforms([sampling.key], length, EVALUATION)
        config = BackendOptions(eos_token_id=m.tokenizer.eos_token_id, pad_token_id=m.tokenizer.pad_token_id)
        ends = end_ids(lm, m.tokenizer.eos_token_id)
        ids: list[int] = []
        logprobs: list[float] = []
        shown = ""
        with m.lock:
            sampler = steps(lm, self._prompts, options, uniform, config)
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
        tokens = torch.tensor([ids])
        mask = torch.ones_like(tokens, dtype=torch.bool)
        rollout = sampled(self._prompts, tokens, mask, torch.tensor([logprobs]), ends)
        self.response = Response(text, bool(rollout.ended), rollout)
        if len(text) > len(shown):
            yield text[len(shown) :]

    def finish(self) -> Response:
        """The whole response; what has not been sampled yet is sampled now."""
        if self.response is None:
            for _ in self:
                pass
        assert self.response is not None
        return self.response
