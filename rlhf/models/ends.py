"""The ids that end a response: the template's end token, and those that the model's own files list.

Llama 3, Qwen and GLM-4 name several in `generation_config.eos_token_id`, some in config.json alone. A single id there
does not count: the text of a base model ends in another token than a turn of the template, and a default is arbitrary.
"""

from transformers import PreTrainedModel


def end_ids(lm: PreTrainedModel, eos: int) -> tuple[int, ...]:
    """`eos`, the tokenizer's end token, then all ids that the configs list, up to the vocabulary's end."""
    vocabulary = int(lm.config.get_text_config().vocab_size)
    return tuple(dict.fromkeys([eos, *(i for i in _listed(lm) if 0 <= i < vocabulary)]))


def saved_ends(lm: PreTrainedModel, eos: int) -> int | list[int]:
    """`eos_token_id` for the configs of a saved model: the list as it came, with `eos`; without a list, `eos`."""
    listed = _listed(lm)
    if not listed:
        return eos
    return listed if eos in listed else [eos, *listed]


def ignored(lm: PreTrainedModel) -> list[str]:
    """The settings of the generation config that end a response in `generate` of transformers, but not here."""
    config = getattr(lm, "generation_config", None)
    return [name for name in ("stop_strings", "forced_eos_token_id") if getattr(config, name, None)]


def _listed(lm: PreTrainedModel) -> list[int]:
    """The lists of the generation config and of the config, each id once."""
    configs: tuple[object, ...] = (getattr(lm, "generation_config", None), lm.config)
    values = [getattr(config, "eos_token_id", None) for config in configs]
    return list(dict.fromkeys(i for ids in values if isinstance(ids, list | tuple) for i in ids))
