"""The score of a trained reward model: of this project, or any one-label sequence classifier of transformers."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.config import Config as Base
from rlhf.engine import frozen
from rlhf.engine.frozen import FrozenEngine
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.models.load import context_length
from rlhf.models.scalar import ScalarModel, load_scalar_model, score_statistics, scores
from rlhf.rewards import Context, Source
from rlhf.storage.manifests import resolve_model_path
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import Template, load_tokenizer, prepare_tokenizer, same_ids
from rlhf.types import SampledRollout, Samples, Sequences, length_groups


class Config(Base):
    model: str | None = None
    """path or hub id of the reward model; by default that of the run"""
    normalize: bool = False
    """(score - mean) / standard deviation, both measured on the held-out responses of the reward model's stage"""


def build(config: Config, context: Context) -> Source:
    """The reward model as a score source.

    If its tokenizer or template differs from the policy's, it gets the text, in its own template.
    """
    model_path = resolve_model_path(config.model or context.reward_model, "model", "critic")
    tokenizer = prepare_tokenizer(load_tokenizer(resolve(model_path)), "auto")
    shards = frozen.shards_of(context.model_options, context.dtype)
    model = load_scalar_model(model_path, context.dtype, id_count(tokenizer), shards)
    same_tokenizer = same_ids(tokenizer, context.tokenizer)
    statistics = score_statistics(model, model_path) if config.normalize else None
    limit = context_length(model.backbone.config)
    engine = FrozenEngine(model, context.model_options, context.dtype)

    def score(samples: Samples) -> Tensor:
        sequences = samples.rollout.sequences if same_tokenizer else _retokenized(samples, tokenizer)
        longest = int(sequences.lengths.max())
        if longest > limit:
            raise UserError(
                f"reward model '{model_path}': its context is {limit} tokens, but a prompt and response have "
                f"{longest}; lower --max-prompt-length or --response-length"
            )
        with engine.inference() as model:
            result = score_sequences(model, sequences.to(context.device), context.micro_batch_size)
        return result if statistics is None else (result - statistics.mean) / statistics.std

    return score


@torch.no_grad()
def score_sequences(model: ScalarModel, sequences: Sequences, micro_batch_size: int) -> Tensor:
    """Scores [B] of whole sequences, rows of similar length together."""
    result = torch.zeros(len(sequences), device=sequences.ids.device)
    for index in length_groups(sequences.lengths, micro_batch_size):
        micro = sequences[index].trimmed()
        result[index] = scores(model(micro), micro.mask)
    return result


def _retokenized(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    """The samples encoded with another tokenizer and template; a response that was cut gets no EOS."""
    template = Template(tokenizer)
    rollout: SampledRollout = samples.rollout
    rows = []
    for row, response, ended in zip(rollout.rows, samples.responses, rollout.ended.tolist(), strict=True):
        response_ids = template.response_ids(response)
        rows.append(template.prompt_ids(row.prompt) + (response_ids if ended else response_ids[:-1]))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return Sequences(ids, mask, torch.zeros_like(mask))
