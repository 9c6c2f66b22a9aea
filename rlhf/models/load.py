"""Models from a directory, a hub id, or a YAML file that describes a new one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlhf.config import UserError, read_yaml
from rlhf.names import resolve
from rlhf.text import load_tokenizer


def load_config(place: str) -> PreTrainedConfig:
    """The transformers config of a model, every dropout in it set to 0.

    Dropout would make the first ratio of PPO differ from 1 and the reference differ from itself.
    Raises: UserError if there is no model at `place`, it needs remote code, or the hub cannot be reached.
    """
    place = resolve(place)
    if place.endswith((".yaml", ".yml")):
        values = read_yaml(place)
        if not isinstance(values.get("model"), dict) or "model_type" not in values["model"]:
            raise UserError(f"{place}: expected a 'model' mapping with a 'model_type', as in configs/models/")
        tokenizer = load_tokenizer(place)
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        config = AutoConfig.for_model(**{"vocab_size": len(tokenizer), **special, **values["model"]})
    else:
        with _readable(place):
            config = AutoConfig.from_pretrained(place)
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


@contextlib.contextmanager
def _readable(place: str) -> Iterator[None]:
    """Turn what transformers raises for a missing or unusable model into one line."""
    if os.sep in place and place.count("/") != 1 and not Path(place).is_dir():
        raise UserError(f"model '{place}': no such directory; expected a Hugging Face model directory, a hub id or a .yaml")
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise UserError(f"model '{place}': the directory has no config.json; expected a Hugging Face model directory")
    try:
        yield
    except (OSError, ValueError) as error:
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"model '{place}': not a directory here, and not to be had from the hub ({first}); "
            "name a local directory, or download it first and set HF_HUB_OFFLINE=1"
        ) from None


def context_length(config: PreTrainedConfig) -> int:
    """Tokens a model of this config can attend to; a large number where the architecture sets no limit."""
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return 1 << 30


def require_context(place: str, tokens: int) -> None:
    """Raises: UserError if sequences of `tokens` do not fit the model's context."""
    limit = context_length(load_config(place))
    if tokens > limit:
        raise UserError(
            f"model '{place}': its context is {limit} tokens, but sequences may have {tokens}; "
            "lower --max-length, --max-prompt-length or --response-length"
        )


def load_causal_lm(place: str, dtype: torch.dtype, tokenizer_size: int, seed: int = 0) -> PreTrainedModel:
    """A causal language model in `dtype`, in eval mode, its embeddings at least `tokenizer_size` rows.

    Raises: UserError for missing or unexpected weights, or a weight that is not finite.
    """
    return _load(AutoModelForCausalLM, place, dtype, tokenizer_size, seed)


def load_backbone(place: str, dtype: torch.dtype, tokenizer_size: int, seed: int = 0) -> PreTrainedModel:
    """The same model without its language-model head: ids to hidden states."""
    return _load(AutoModel, place, dtype, tokenizer_size, seed)


def _load(auto: Any, place: str, dtype: torch.dtype, tokenizer_size: int, seed: int) -> PreTrainedModel:
    config = load_config(place)
    source = resolve(place)
    if source.endswith((".yaml", ".yml")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = auto.from_config(config).to(dtype)
    else:
        with _readable(source):
            model, info = auto.from_pretrained(source, config=config, dtype=dtype, output_loading_info=True)
        missing = sorted(info["missing_keys"])
        if missing:
            raise UserError(f"model '{place}': {len(missing)} weights are missing, first {missing[0]}")
    rows = model.get_input_embeddings().num_embeddings
    if rows < tokenizer_size:
        model.resize_token_embeddings(tokenizer_size, mean_resizing=False)
    refuse_non_finite(model, place)
    return model.eval()


def refuse_non_finite(model: nn.Module, place: str) -> None:
    """Raises UserError naming the first weight with a NaN or an infinity."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
            raise UserError(f"model '{place}': weight {name} has values that are not finite")
