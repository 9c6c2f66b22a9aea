"""Methods that put learned embeddings before every row. They cannot be merged into weights."""

import copy
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from rlhf.adapters._peft import refuse_compiler
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.models import virtual_tokens
from rlhf.models.adapter_files import ALONE, method_name


class VirtualTokens:
    """The adapter of a prompt-learning config of peft, of a language model that is saved as it: in step 1 alone."""

    def __init__(self, options: Any, learning_rate: float) -> None:
        self._options, self.learning_rate = options, learning_rate
        self.tokens_before: int = options.num_virtual_tokens

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError under ZeRO-3, for split models, and for the compiler."""
        method = method_name(self._options)
        refuse_compiler(options, method)
        if options.zero_stage == 3 or options.sequence_parallel_size * options.tensor_parallel_size > 1:
            raise UserError(
                f"adapter {method}: got --zero-stage 3 or a split model, expected whole weights: use --zero-stage 0, 1 "
                "or 2, or --adapter lora"
            )

    def wrap(self, model: PreTrainedModel) -> None:
        embeddings = virtual_tokens.attach(model, copy.deepcopy(self._options))
        width, expected = embeddings.weight.shape[1], embeddings.encoder.embedding.embedding_dim
        if width != expected:
            raise UserError(
                f"adapter {method_name(self._options)}: got embeddings of {width} numbers, expected the model's width "
                f"of {expected}; --adapter lora has no such limit"
            )

    def disabled(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        raise UserError(f"adapter {method_name(self._options)}: {ALONE}")

    def merged(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        raise UserError(f"adapter {method_name(self._options)}: {ALONE}")
