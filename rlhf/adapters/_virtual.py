"""Methods of peft that put learned tokens before every row, or learned keys and values into every layer.

peft has a wrapper with a forward pass of its own. Here hooks on the model's backbone do the same, so the model stays
the same object. There is no merged form: step 1 saves the tokens as a PEFT adapter, the other stages refuse the method.
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, PrefixTuningConfig, TaskType, get_peft_model, get_peft_model_state_dict
from peft.config import PromptLearningConfig
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.distributed.zero3 import gather_weights, library_support
from rlhf.errors import UserError
from rlhf.models import adapter_files, packing

HOLDER = "virtual_tokens"
"""the attribute of a wrapped model with its `_Tokens`"""


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
        if options.gradient_checkpointing and self._in_cache:
            raise UserError(f"adapter {self._method}: excludes --gradient-checkpointing, which has no key-value cache")

    def wrap(self, model: PreTrainedModel) -> None:
        options = copy.deepcopy(self._options)
        options.task_type = TaskType.CAUSAL_LM
        with library_support(model):
            wrapper = get_peft_model(model, options, autocast_adapter_dtype=False)
        width: Any = model.get_input_embeddings()
        if not self._in_cache and width.embedding_dim != options.token_dim:
            raise UserError(
                f"adapter {self._method}: got embeddings of {width.embedding_dim} numbers, expected the "
                f"model's width of {options.token_dim}"
            )
        model.requires_grad_(False)
        model.prompt_encoder = wrapper.prompt_encoder.to(model.dtype).requires_grad_(True)
        tokens = _Tokens(wrapper, self._in_cache)
        setattr(model, HOLDER, tokens)
        setattr(model, packing.FLAG, False)
        backbone: Any = getattr(model.base_model, "decoder", model.base_model)  # OPT calls its decoder
        backbone.register_forward_pre_hook(tokens.add, with_kwargs=True)
        backbone.register_forward_hook(tokens.remove)

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

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """The tokens as peft saves them: `PeftModel.from_pretrained(base, directory)`."""
        wrapper = getattr(model, HOLDER).wrapper
        encoder: Any = model.prompt_encoder
        with gather_weights(encoder.parameters()), torch.no_grad():
            if collectives.is_main():
                options, base = (
                    copy.deepcopy(wrapper.active_peft_config),
                    adapter_files.base_of(str(model.name_or_path)),
                )
                directory.mkdir(parents=True, exist_ok=True)
                adapter_files.write(options, base, get_peft_model_state_dict(wrapper), directory)
                model.config.save_pretrained(directory)


class _Tokens:
    """The hooks of a wrapped backbone, whose input is `input_ids` of right-padded rows alone."""

    def __init__(self, wrapper: PeftModel, in_cache: bool) -> None:
        self.wrapper, self.enabled = wrapper, True
        self._in_cache = in_cache

    def add(self, backbone: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Put the tokens before the rows, or their keys and values into the cache."""
        if not self.enabled:
            return None
        if any(named.get(name) is not None for name in ("attention_mask", "position_ids", "past_key_values")):
            raise UserError("an adapter of virtual tokens is for training and log-probs; it cannot generate")
        ids = arguments[0] if arguments else named.pop("input_ids")  # GPT-2 has it by position
        prompt = self.wrapper.get_prompt(batch_size=len(ids))
        if self._in_cache:
            return (), {**named, "input_ids": ids, "past_key_values": prompt}
        embeddings = backbone.get_input_embeddings()(ids)
        rows = torch.cat([prompt.to(embeddings.dtype), embeddings], dim=1)
        return (), {**named, "input_ids": None, "inputs_embeds": rows}

    def remove(self, backbone: Any, arguments: tuple[Any, ...], output: Any) -> Any:
        """Drop the states of the tokens."""
        if self.enabled and not self._in_cache:
            output.last_hidden_state = output.last_hidden_state[:, self.wrapper.active_peft_config.num_virtual_tokens :]
        return output
