"""The score of a trained reward model: of this project, or any one-label sequence classifier of transformers."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import console
from rlhf.config import Config as Base
from rlhf.engine import frozen
from rlhf.engine.frozen import FrozenEngine
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.models.load import Loading, context_length, load_config
from rlhf.models.reading import Reading, compare, describe, reading_of
from rlhf.models.scalar import ScalarModel, load_scalar_model, score_statistics, scores
from rlhf.rewards import Context, Source
from rlhf.storage.manifests import resolve_model_path
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer, same_ids
from rlhf.text.truncate import fit_prompt, fit_sequence, min_prompt_length
from rlhf.types import Message, Row, SampledRollout, Samples, Sequences, length_groups, to_device

AT_ONCE = 1000
"""prompts that are tokenised together"""


class Config(Base):
    model: str | None = None
    """path or hub id of the reward model; by default that of the run"""
    normalize: bool = False
    """(score - mean) / standard deviation, both measured on the held-out responses of the reward model's stage"""


def build(config: Config, context: Context) -> Source:
    """The reward model as a score source.

    If its tokenizer or template differs from the policy's, it gets the text of what the policy saw, in its own
    template. What is longer than its context is truncated as in training (`fit_sequence`).
    """
    model_path = resolve_model_path(config.model or context.reward_model, "model", "critic")
    tokenizer = prepare_tokenizer(load_tokenizer(resolve(model_path)), "auto")
    model = context.loaded.get(model_path)
    if model is None:
        shards, kind = frozen.shards_of(context.model_options, context.dtype), context.model_options.quantize or "none"
        loading = Loading(shards=shards, quantize=kind)
        model = load_scalar_model(model_path, context.dtype, id_count(tokenizer), loading)
    same_tokenizer = same_ids(tokenizer, context.tokenizer)
    statistics = score_statistics(model_path) if config.normalize else None
    limit = context_length(model.backbone.config)
    policy, template = Template(context.tokenizer), Template(tokenizer)
    reading = reading_of(model_path, template)
    engine = FrozenEngine(model, context.model_options, context.dtype)
    _say_reading(model_path, reading, template, engine, context)

    def score(samples: Samples) -> Tensor:
        if same_tokenizer:
            sequences = finished_sequences(samples.rollout, reading, tokenizer.eos_token_id, limit)
        else:
            sequences = _retokenized(samples, policy, template, reading, limit)
        longest = int(sequences.lengths.max())
        if longest > limit:
            raise UserError(
                f"reward model '{model_path}': its context is {limit} tokens, but a prompt and response have "
                f"{longest}; lower --max-prompt-length or --response-length"
            )
        with engine.inference() as model:
            result = score_sequences(model, sequences, context.micro_batch_size)
        return result if statistics is None else (result - statistics.mean) / statistics.std

    return score


@torch.no_grad()
def score_sequences(model: ScalarModel, sequences: Sequences, micro_batch_size: int) -> Tensor:
    """Scores [B] of whole sequences, rows of similar length together."""
    groups = length_groups(sequences.lengths, micro_batch_size)
    micros = (sequences[index].trimmed() for index in groups)
    by_group = torch.cat([scores(model(micro), micro.mask) for micro in micros])
    return by_group[to_device(torch.cat(groups).argsort(), by_group.device)]


def require_fitting(path: str, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> None:
    """Check that the reward model at `path` can score a response of any length to the prompt of each row.

    tokenizer: that of the reward model, prepared
    Raises: UserError if a prompt does not fit into its context beside a response, however it is truncated.
    """
    template, limit = Template(tokenizer), context_length(load_config(path))
    smallest = min_prompt_length(template, limit)
    for start in range(0, len(rows), AT_ONCE):
        batch = rows[start : start + AT_ONCE]
        for row, ids in zip(batch, template.prompt_ids_many(batch), strict=True):
            if len(ids) > smallest and fit_prompt(template, row, smallest, by_tokens=True) is None:
                raise _too_long(path, limit, row.prompt, len(ids))


def _too_long(path: str, limit: int, prompt: Sequence[Message], tokens: int) -> UserError:
    text = prompt[-1].content[-60:] if prompt else ""
    return UserError(
        f"reward model '{path}': its context is {limit} tokens, too few for its chat template and the prompt that ends "
        f"in {text!r} ({tokens} tokens), even truncated; lower --max-prompt-length, or choose another reward model"
    )


def _say_reading(path: str, reading: Reading, template: Template, engine: FrozenEngine, context: Context) -> None:
    """Say where a reward model is read that is not read where ours are. Sharded weights are compared with nothing."""
    line = describe(path, reading, template.tokenizer)
    if line is None:
        return
    if reading.foreign and context.model_options.zero_stage != 3:
        with engine.inference() as model:
            line += compare(path, path, model, reading, template)
    console.say(line)


def finished_sequences(rollout: SampledRollout, reading: Reading, eos: int, limit: int) -> Sequences:
    """The prompts and responses of a rollout as the reward model has learned to read them.

    A response that has ended gets the model's ending in place of the token that it ended in, if there is room in
    `limit` tokens; a response that was cut stays as it is.
    """
    responses, ended = rollout.response_tokens(), rollout.ended.tolist()
    if reading.ending == (eos,) and all(ids[-1] == eos for ids, end in zip(responses, ended, strict=True) if end):
        return rollout.sequences
    rows = []
    for prompt, mask, response, end in zip(rollout.prompt_ids, rollout.prompt_mask, responses, ended, strict=True):
        ids = prompt[mask].tolist()
        finished = reading.finished(response, 1) if end else response
        rows.append([*ids, *(finished if len(ids) + len(finished) <= limit else response)])
    return _padded(rows)


def _retokenized(samples: Samples, policy: Template, template: Template, reading: Reading, limit: int) -> Sequences:
    """The samples encoded with another tokenizer and template than the `policy`'s, each at most `limit` tokens; a
    response that was cut gets no ending. A thought is scored if the template writes thoughts."""
    rollout: SampledRollout = samples.rollout
    rows = []
    responses = zip(rollout.rows, samples.prompts, rollout.tokens_before_end(), rollout.ended.tolist(), strict=True)
    for row, prompt, tokens, ended in responses:
        ids = template.scored_ids(row, policy.answer(tokens, prompt))
        fitted = fit_sequence(template, row, reading.finished(ids, 1) if ended else ids[:-1], limit)
        if fitted is None:
            size = len(template.prompt_ids(row.prompt, row.variables))
            raise _too_long(str(template.tokenizer.name_or_path), limit, row.prompt, size)
        rows.append(fitted)
    return _padded(rows)


def _padded(rows: Sequence[Sequence[int]]) -> Sequences:
    """Right-padded rows, which end where they are read."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return Sequences(ids, mask, torch.zeros_like(mask))
