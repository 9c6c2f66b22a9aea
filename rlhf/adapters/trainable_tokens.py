"""Trainable tokens: some rows of the embeddings, and of a head that is tied to them, by peft; for new tokens, say."""

from contextlib import AbstractContextManager
from typing import Any

from peft import TrainableTokensConfig
from pydantic import Field
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter
from rlhf.config import Config as Base
from rlhf.distributed.zero3 import full_shape, gather_weights
from rlhf.errors import UserError

LEARNING_RATE = 1e-3
"""as prompt tuning in peft's method_comparison, which also trains rows of embeddings"""


class Config(Base):
    token_indices: list[int] = Field(min_length=1)
    """ids of the tokens"""


def build(config: Config) -> "TrainableTokens":
    """The rows start as they are."""
    return TrainableTokens(TrainableTokensConfig(token_indices=config.token_indices), LEARNING_RATE)


class TrainableTokens(PeftAdapter):
    """peft copies rows of the embeddings; those of sharded weights it would copy on CUDA only."""

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        embeddings: Any = model.get_input_embeddings()
        rows = full_shape(embeddings.weight)[0]
        wrong = [index for index in options.token_indices if not 0 <= index < rows]
        if wrong:
            raise UserError(f"adapter trainable_tokens: got the id {wrong[0]}, expected ids from 0 to {rows - 1}")
        return options

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        return gather_weights(model.get_input_embeddings().parameters())
