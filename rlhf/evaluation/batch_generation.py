"""Policies that respond to the prompts of a file: where they are, what they have in common, the batches they get."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import plugins, rewards
from rlhf.config.options import EngineOptions, PromptFileOptions
from rlhf.distributed import collectives
from rlhf.engine.training import compute_dtype
from rlhf.errors import UserError
from rlhf.generation import Backend, open_backend
from rlhf.hub.short_names import resolve
from rlhf.maths.uniforms import uniforms
from rlhf.models.load import context_length, load_causal_lm, load_config
from rlhf.models.policy import Policy
from rlhf.storage.manifests import model_place
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import Template, load_tokenizer, prepare_tokenizer, same_ids
from rlhf.types import Prompts, Row


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts in the ids of one tokenizer. A prompt stands as many times in a row as one policy responds to it."""

    options: PromptFileOptions
    tokenizer: PreTrainedTokenizerBase
    rows: tuple[Row, ...]
    """[N]"""
    ids: tuple[list[int], ...]
    """[N] of the rendered prompts"""

    def batches(self, device: torch.device, stream: int = 0) -> Iterator[tuple[Prompts, Tensor]]:
        """The prompts, left-padded, and the uniform numbers [B, T] to sample each response with: the same for every
        policy of one `stream`."""
        o = self.options
        for start in range(0, len(self.rows), o.rollout_batch_size):
            here = slice(start, start + o.rollout_batch_size)
            keys = [(o.seed, stream, i) for i in range(len(self.rows))[here]]
            prompts = _left_padded(self.ids[here], self.rows[here], self.tokenizer.pad_token_id)
            yield prompts.to(device), uniforms(keys, o.response_length).to(device)


@dataclass(frozen=True, slots=True)
class Respondents:
    """What every policy that responds to `questions` is loaded with, sampled by and judged with."""

    questions: Questions
    device: torch.device
    dtype: torch.dtype

    def load(self, place: str) -> Policy:
        """Raises: UserError if there is no such model."""
        q = self.questions
        model = load_causal_lm(place, self.dtype, id_count(q.tokenizer), q.options.seed)
        return Policy(model).to(self.device).requires_grad_(False)

    def backend(self) -> Backend:
        t = self.questions.tokenizer
        return open_backend("loop", eos_token_id=t.eos_token_id, pad_token_id=t.pad_token_id)

    def source(self, micro_batch_size: int) -> rewards.Source:
        """The score source that the options name."""
        q = self.questions
        context = rewards.Context(q.tokenizer, self.device, self.dtype, "", micro_batch_size)
        return rewards.open_source(str(q.options.reward), context)


def respondents(questions: Questions) -> Respondents:
    device = collectives.local_device()
    return Respondents(questions, device, compute_dtype(EngineOptions(dtype=questions.options.dtype), device))


def policy_place(place: str) -> str:
    """The model of a policy: of a stage what it trained. Raises: UserError for an unfinished stage."""
    return resolve(model_place(place, "actor", "model"))


def check_reward(spec: str) -> None:
    """Raises: UserError if it is the run's reward model, of which there is none here."""
    name, _, _ = spec.partition(",")
    if name == "learned" and plugins.parse_spec(spec)[1].get("model") is None:
        raise UserError("--reward learned: of which reward model? write --reward learned,model=DIR")


def require_writable(directory: Path, option: str) -> None:
    """Make the directory. Raises: UserError if nothing can be written in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"{option}: cannot write there ({error.strerror}); name another directory") from None


def questions(
    prompts: Sequence[tuple[str, Row]], places: Sequence[str], options: PromptFileOptions, repeat: int
) -> Questions:
    """The (file:line, row) of `read_prompts` for the policies at `places`, each `repeat` times in a row.

    Raises: UserError if the policies write other ids, or a prompt and its response do not fit one of them.
    """
    compute_dtype(EngineOptions(dtype=options.dtype), collectives.local_device())
    tokenizer = _one_tokenizer(places, options.chat_template)
    ids = _encoded(prompts, tokenizer)
    for place in places:
        _require_room(prompts, ids, place, options.response_length)
    repeated = [i for i in range(len(prompts)) for _ in range(repeat)]
    return Questions(options, tokenizer, tuple(prompts[i][1] for i in repeated), tuple(ids[i] for i in repeated))


def _one_tokenizer(places: Sequence[str], chat_template: str) -> PreTrainedTokenizerBase:
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


def _encoded(prompts: Sequence[tuple[str, Row]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    template = Template(tokenizer)
    ids = []
    for where, row in prompts:
        try:
            ids.append(template.prompt_ids(row.prompt))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return ids


def _require_room(prompts: Sequence[tuple[str, Row]], ids: list[list[int]], place: str, response_length: int) -> None:
    """Raises: UserError if a prompt and its response do not fit the model's context; cut, it would be another one."""
    limit = context_length(load_config(place))
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    if len(ids[longest]) + response_length > limit:
        raise UserError(
            f"{prompts[longest][0]}: the prompt has {len(ids[longest])} tokens, with --response-length "
            f"{response_length} more than the context of '{place}', {limit}; leave it out, or lower --response-length"
        )


def _left_padded(ids: tuple[list[int], ...], rows: tuple[Row, ...], pad_id: int) -> Prompts:
    width = max(map(len, ids))
    padded = torch.tensor([[pad_id] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids])
    return Prompts(padded, mask, rows)
