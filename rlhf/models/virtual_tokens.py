"""Learned tokens before every row, or learned keys and values in every layer: peft's methods that have no merged form.

peft has a wrapper with a forward pass of its own. Here hooks on the model's backbone do the same, so the model stays
the same object.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.hub.untrusted import ADAPTER, is_adapter, read_mappings
from rlhf.models import adapter_files, packing
from rlhf.models.traits import attends_to_all, cache_argument

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel  # importing it takes more than a second

HOLDER = "virtual_tokens"
"""the attribute of a model with its `Tokens`"""
IN_CACHE = "PREFIX_TUNING"
"""the method of peft whose tokens are keys and values"""


class Tokens:
    """The hooks of a backbone. Its input is `input_ids` of right-padded rows alone; or, to sample, what `generate` of
    transformers passes: a key-value cache, and of the tokens in it and after it a mask [B, S] and positions [B, S]."""

    def __init__(self, wrapper: "PeftModel") -> None:
        self.wrapper, self.enabled = wrapper, True
        self._in_cache = wrapper.active_peft_config.peft_type == IN_CACHE
        self.count: int = wrapper.active_peft_config.num_virtual_tokens

    def add(self, backbone: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Put the tokens before the rows, or their keys and values into the cache."""
        if not self.enabled:
            return None
        ids = arguments[0] if arguments else named.pop("input_ids")  # GPT-2 has it by position
        cache_name = str(cache_argument(backbone))
        cache, begins = named.get(cache_name), True
        if cache is None and any(named.get(name) is not None for name in ("attention_mask", "position_ids")):
            raise UserError("a model with virtual tokens got rows with a mask or positions, expected right-padded ids")
        if cache is not None:
            if not attends_to_all(backbone.config):
                raise UserError(
                    f"model type '{backbone.config.model_type}': its attention has a window, which would count padding "
                    "after virtual tokens; expected another adapter to sample with"
                )
            begins = cache.get_seq_length() == 0
            named = self._shifted(named, begins and not self._in_cache)
        if not begins:
            return (), {**named, "input_ids": ids}
        prompt: Any = self.wrapper.get_prompt(batch_size=len(ids))
        if self._in_cache:
            if cache is None:
                return (), {**named, "input_ids": ids, cache_name: prompt}
            for number, layer in enumerate(prompt.layers):
                cache.update(layer.keys, layer.values, number)
            return (), {**named, "input_ids": ids}
        embeddings = backbone.get_input_embeddings()(ids)
        rows = torch.cat([prompt.to(embeddings.dtype), embeddings], dim=1)
        return (), {**named, "input_ids": None, "inputs_embeds": rows}

    def _shifted(self, named: dict[str, Any], with_positions: bool) -> dict[str, Any]:
        """The arguments of a pass with a cache, in which the tokens come before the rows, and before their padding.

        with_positions: the pass has the tokens themselves
        """
        mask, positions = named["attention_mask"], named.get("position_ids")
        named = {**named, "attention_mask": torch.cat([mask.new_ones(len(mask), self.count), mask], dim=1)}
        if positions is not None:
            first = torch.arange(self.count, device=mask.device).expand(len(mask), -1)
            shifted = positions + self.count
            named["position_ids"] = torch.cat([first, shifted], dim=1) if with_positions else shifted
        return named

    def remove(self, backbone: object, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        """Drop the states of the tokens, from a pass that has them."""
        if self.enabled and named.get("inputs_embeds") is not None:
            output.last_hidden_state = output.last_hidden_state[:, self.count :]
        return output


def attach(model: PreTrainedModel, options: "PeftConfig") -> Tokens:
    """Add tokens to a model, which is frozen, and whose rows are padded from now on: a packed row has one start only.

    model: with the output layers of a language model, or without. options: of peft, which it completes
    """
    from peft import TaskType, get_peft_model

    backbone = model.base_model is model
    options.task_type = TaskType.FEATURE_EXTRACTION if backbone else TaskType.CAUSAL_LM
    wrapper: Any = get_peft_model(model, options, autocast_adapter_dtype=False)
    model.requires_grad_(False)
    model.prompt_encoder = wrapper.prompt_encoder.to(model.dtype)
    tokens = Tokens(wrapper)
    inner: Any = getattr(model.base_model, "decoder", model.base_model)  # OPT calls its decoder
    for module in (model, model.base_model):  # a critic calls the model without its head
        setattr(module, HOLDER, tokens)
        setattr(module, packing.FLAG, False)
    inner.register_forward_pre_hook(tokens.add, with_kwargs=True)
    inner.register_forward_hook(tokens.remove, with_kwargs=True)
    return tokens


def on(model: object) -> bool:
    """Whether a model has virtual tokens."""
    return hasattr(model, HOLDER)


def are_in(path: str) -> bool:
    """Whether a directory has virtual tokens in place of whole weights."""
    if not is_adapter(Path(path)):
        return False
    values = read_mappings(f"model '{path}'", Path(path), [ADAPTER])[ADAPTER]
    return values.get("num_virtual_tokens") is not None


def load(model: PreTrainedModel, path: str) -> None:
    """Add the tokens in a directory to a model.

    Raises: UserError if they do not fit the model, are missing, or are not finite.
    """
    from peft import PeftConfig, set_peft_model_state_dict

    options: Any = PeftConfig.from_pretrained(path)
    options.inference_mode = True
    prompts = adapter_files.read_weights(path).get("prompt_embeddings")
    if prompts is None or not torch.isfinite(prompts).all():
        raise UserError(f"adapter '{path}': got no or not finite weights prompt_embeddings, expected finite ones")
    tokens = attach(model, options)
    encoder: Any = tokens.wrapper.prompt_encoder[adapter_files.ONLY]
    weight = encoder.embedding.weight
    if weight.shape != prompts.shape:
        raise UserError(
            f"adapter '{path}': got tokens of shape {list(prompts.shape)}, expected {list(weight.shape)} of its base "
            "model and its options"
        )
    set_peft_model_state_dict(tokens.wrapper, {"prompt_embeddings": prompts})
    encoder.to(model.dtype)
