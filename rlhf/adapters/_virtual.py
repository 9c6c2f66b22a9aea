"""Methods of peft that put learned tokens before every row, or learned keys and values into every layer.

There is no merged form: a stage saves the tokens as a PEFT adapter, from which no stage trains further.
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PrefixTuningConfig, get_peft_model_state_dict
from peft.config import PromptLearningConfig
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.distributed.zero3 import gather_weights, library_support
from rlhf.errors import UserError
from rlhf.models import adapter_files, virtual_tokens
from rlhf.models.virtual_tokens import HOLDER


class VirtualTokens:
    """The adapter of a prompt-learning config of peft. Rows are padded, not packed: a packed row has one start only."""

    def __init__(self, options: PromptLearningConfig, learning_rate: float) -> None:
        self._options, self.learning_rate = options, learning_rate
        self._method = adapter_files.method_name(options)
        self._in_cache = isinstance(options, PrefixTuningConfig)

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError for options of which the backbone's forward pass is not transformers' own."""
        if options.torch_compile or options.sequence_parallel_size > 1:
            raise UserError(f"adapter {self._method}: excludes --torch-compile and --sequence-parallel-size")
        if options.zero_stage == 3 and not options.gather_whole:
            raise UserError(
                f"adapter {self._method}: excludes --no-gather-whole, with which every pass gathers the same weights: "
                "only the first pass of sampling has the tokens"
            )
        if options.gradient_checkpointing and self._in_cache:
            raise UserError(f"adapter {self._method}: excludes --gradient-checkpointing, which has no key-value cache")

    def wrap(self, model: PreTrainedModel) -> None:
        options = copy.deepcopy(self._options)
        with library_support(model):
            tokens = virtual_tokens.attach(model, options)
        width: Any = model.get_input_embeddings()
        if not self._in_cache and width.embedding_dim != options.token_dim:
            raise UserError(
                f"adapter {self._method}: got embeddings of {width.embedding_dim} numbers, expected the "
                f"model's width of {options.token_dim}"
            )
        tokens.wrapper.prompt_encoder.requires_grad_(True)

    @contextlib.contextmanager
    def disabled(self, model: PreTrainedModel) -> Iterator[None]:
        tokens = getattr(model, HOLDER)
        tokens.enabled = False
        try:
            yield
        finally:
            tokens.enabled = True

    def merged(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        raise UserError(f"adapter {self._method}: cannot be merged into the weights")

    def save(self, model: PreTrainedModel, directory: Path, head: Tensor | None) -> None:
        """The tokens as peft saves them: `PeftModel.from_pretrained(base, directory)`."""
        wrapper: Any = getattr(model, HOLDER).wrapper
        with gather_weights(wrapper.prompt_encoder.parameters()), torch.no_grad():
            if collectives.is_main():
                options = copy.deepcopy(wrapper.active_peft_config)
                base = adapter_files.base_of(str(model.name_or_path))
                state = get_peft_model_state_dict(wrapper, save_embedding_layers=False)  # they are frozen
                options.task_type = "CAUSAL_LM" if head is None else "SEQ_CLS"
                if head is not None:
                    options.modules_to_save, state[adapter_files.HEAD_BESIDE_TOKENS] = ["score"], head
                directory.mkdir(parents=True, exist_ok=True)
                adapter_files.write(options, base, state, directory)
                model.config.save_pretrained(directory)
