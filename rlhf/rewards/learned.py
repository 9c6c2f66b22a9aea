"""The score of a trained reward model: ours, or any one-label sequence classifier of transformers."""

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
from rlhf.storage.manifests import model_place
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import Template, load_tokenizer, prepare_tokenizer, same_ids
from rlhf.types import Rollout, Samples, Sequences, length_groups


class Config(Base):
    model: str | None = None
    """place of the reward model; by default the run's"""
    normalize: bool = False
    """scores less their mean, over their standard deviation, on the held-out responses of the reward model's stage"""


def build(config: Config, context: Context) -> Source:
    """The reward model as a score source.

    A model with another tokenizer or template than the policy's gets the text, in its own template.
    """
    place = model_place(config.model or context.reward_model, "model", "critic")
    tokenizer = prepare_tokenizer(load_tokenizer(resolve(place)), "auto")
    shards = frozen.shards_of(context.held, context.dtype)
    model = load_scalar_model(place, context.dtype, id_count(tokenizer), shards)
    shared = same_ids(tokenizer, context.tokenizer)
    known = score_statistics(model, place) if config.normalize else None
    limit = context_length(model.backbone.config)
    engine = FrozenEngine(model, context.held, context.dtype)

    def score(samples: Samples) -> Tensor:
        sequences = samples.rollout.sequences if shared else _in_its_own_words(samples, tokenizer)
        longest = int(sequences.lengths.max())
        if longest > limit:
            raise UserError(
                f"reward model '{place}': its context is {limit} tokens, but a prompt and response have {longest}; "
                "lower --max-prompt-length or --response-length"
            )
        with engine.inference() as model:
            found = score_sequences(model, sequences.to(context.device), context.micro_batch_size)
        return found if known is None else (found - known.mean) / known.std

    return score


@torch.no_grad()
def score_sequences(model: ScalarModel, sequences: Sequences, micro_batch_size: int) -> Tensor:
    """Scores [B] of whole sequences, rows of similar length together."""
    result = torch.zeros(len(sequences), device=sequences.ids.device)
    for index in length_groups(sequences.lengths, micro_batch_size):
        micro = sequences[index].trimmed()
        result[index] = scores(model(micro), micro.mask)
    return result


def _in_its_own_words(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    """The samples as another tokenizer and template write them; a response cut short gets no EOS there either."""
    template = Template(tokenizer)
    rollout: Rollout = samples.rollout
    rows = []
    for row, response, ended in zip(rollout.rows, samples.responses, rollout.ended.tolist(), strict=True):
        response_ids = template.response_ids(response)
        rows.append(template.prompt_ids(row.prompt) + (response_ids if ended else response_ids[:-1]))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return Sequences(ids, mask, torch.zeros_like(mask))
