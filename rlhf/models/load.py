"""Models from a directory, a hub id, or a YAML file that describes a new one."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlhf import console, kernels
from rlhf.config import Tree, read_yaml
from rlhf.config.options import Quantize
from rlhf.distributed import collectives
from rlhf.distributed.zero3 import Shards, gather_weights
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import (
    LOAD_ERRORS,
    is_adapter,
    reason,
    refuse_adapter,
    refuse_model,
    refuse_whole_numbers,
    with_file,
)
from rlhf.models import adapter_files, ends, lm_head, new_rows, packing, quantized, virtual_tokens
from rlhf.models.traits import attention_options, class_of, has_attention, has_key_value_cache
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer

HEADS = re.compile(r"(lm_head|embed_out|score)\.")
"""Weights that a model without a head does not have."""
MOST_NEW = 0.1
"""new rows, as a share of the embedding's rows, above which the tokenizer is another model's"""
REQUESTS = {
    "output_router_logits": False,
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
}
"""entries of a config that change what a pass returns, as every pass here needs them"""


def load_config(path: str) -> PreTrainedConfig:
    """The transformers config of a model, all randomness of its forward pass (dropout, jitter) set to 0.

    Dropout would make the first ratio of PPO differ from 1 and the reference differ from itself.
    Raises: UserError if there is no model at `path`, it needs remote code, or the hub cannot be reached.
    """
    path = with_file(resolve(path), "config.json")
    if path.endswith((".yaml", ".yml")):
        values = read_yaml(path)
        if not isinstance(values.get("model"), dict) or "model_type" not in values["model"]:
            raise UserError(f"{path}: expected a 'model' mapping with a 'model_type', as in configs/models/")
        tokenizer = load_tokenizer(path)
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        with explain_load_errors(path):
            config = AutoConfig.for_model(**{"vocab_size": id_count(tokenizer), **special, **values["model"]})
    else:
        with explain_load_errors(path):
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        _refuse_foreign_kernels(config, path)
        _refuse_bitsandbytes(config, path)
    remove_randomness(config)
    return config


def remove_randomness(config: PreTrainedConfig) -> None:
    """Set all randomness of the forward pass to 0, in the config and the configs nested in it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            remove_randomness(value)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def leave_out_requests(config: PreTrainedConfig, path: str) -> None:
    """Turn off what a config asks every pass to return, beside the logits, and say where a loss goes with it.

    transformers cannot sample with router logits, and a pass that returns a tuple has no `logits`.
    """
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        weight = getattr(text, "router_aux_loss_coef", 0)
        console.say(
            f"note: model '{path}': its config asks for the balance loss of a mixture of experts "
            f"(output_router_logits, weight {weight:g}); no stage trains on it, and it is left out"
        )
    for part in (config, text):
        for name, value in REQUESTS.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)


def set_dropout(model: nn.Module, share: float, path: str) -> None:
    """Drop `share` of the activations in train mode, wherever the architecture has a dropout; the config keeps 0.

    Whole layers are never dropped: under ZeRO-3 all ranks must run the same ones.
    """
    changed = 0
    for module in model.modules():
        names = [name for name, value in vars(module).items() if "dropout" in name and type(value) in (int, float)]
        for name in ["p"] if isinstance(module, nn.Dropout) else names:
            setattr(module, name, share)
            changed += 1
    if not changed:
        console.say(f"note: --dropout {share:g} has no effect: the architecture of model '{path}' has no dropout")


def _refuse_foreign_kernels(config: PreTrainedConfig, path: str) -> None:
    """Raises: UserError if the config names an implementation on a hub, which would be downloaded and executed."""
    for name in ("attn_implementation", "experts_implementation"):
        value = getattr(config, f"_{name}", None)
        if isinstance(value, str) and "/" in value:
            raise UserError(
                f"model '{path}': its config.json requests code from the hub ({name} {value}); remove that key"
            )


def _refuse_bitsandbytes(config: PreTrainedConfig, path: str) -> None:
    """Raises: UserError if the config asks for weights of 4 or 8 bits by bitsandbytes."""
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and (
        quantization.get("quant_method") == "bitsandbytes" or {"load_in_4bit", "load_in_8bit"} & {*quantization}
    ):
        raise UserError(
            f"model '{path}': its config.json has a quantization_config of bitsandbytes; expected the model that it "
            "was made from, with --quantize nf4 to train an adapter over 4 bits"
        )


@contextlib.contextmanager
def explain_load_errors(path: str) -> Iterator[None]:
    """Turn errors of transformers for a missing, damaged or unsupported model into a UserError of one line."""
    exists = Path(path).exists()
    if os.sep in path and path.count("/") != 1 and not exists:
        raise UserError(
            f"model '{path}': no such directory; expected a Hugging Face model directory, a hub id or a .yaml"
        )
    described = Path(with_file(path, "config.json"))
    if described.is_dir() and not (described / "config.json").is_file():
        raise UserError(
            f"model '{described}': the directory has no config.json; expected a Hugging Face model directory"
        )
    refuse_model(path)
    try:
        yield
    except UserError:
        raise
    except LOAD_ERRORS as error:
        first = reason(path, error)
        if exists:
            raise UserError(f"model '{path}': cannot be loaded: {first}") from None
        raise UserError(
            f"model '{path}': not a local directory, and cannot be loaded from the hub ({first}); "
            "name a local directory, or download it first and set HF_HUB_OFFLINE=1"
        ) from None


def context_length(config: PreTrainedConfig) -> int:
    """Tokens a model of this config can attend to; a large number where the architecture sets no limit."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        if isinstance(getattr(text, name, None), int):
            return int(getattr(text, name))
    return 1 << 30


def require_context(path: str, tokens: int) -> None:
    """Raises: UserError if sequences of `tokens` do not fit the model's context."""
    limit = context_length(load_config(path))
    if tokens > limit:
        raise UserError(
            f"model '{path}': its context is {limit} tokens, but sequences may have {tokens}; "
            "lower --max-length, or in step 3 --max-prompt-length or --response-length"
        )


def require_decoder(path: str) -> None:
    """Raises: UserError for a model that no stage can use: with an encoder (T5, BART), or recurrent (Mamba, RWKV)."""
    _refuse_architecture(load_config(path), path)


def _refuse_architecture(config: PreTrainedConfig, path: str) -> None:
    if not has_attention(config):
        raise UserError(
            f"model '{path}': got a {config.model_type}, expected an attention model such as those of the families "
            "Llama, Qwen, OPT and GPT-2; recurrent (state-space) models are not supported"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"model '{path}': got an encoder-decoder ({config.model_type}), expected a causal language model (a "
            "decoder), such as those of the families Llama, Qwen, OPT and GPT-2"
        )


def require_generating(path: str) -> None:
    """Raises: UserError for a model that cannot sample responses: without a language-model head, or recurrent (Mamba,
    RWKV), without the key-value cache of an attention model."""
    config = load_config(path)
    model = class_of(AutoModelForCausalLM, config)
    if model is None:
        raise UserError(f"model '{path}': transformers has no causal language model of the type {config.model_type}")
    if not has_key_value_cache(model, config):
        raise UserError(
            f"model '{path}': got a {config.model_type}, expected an attention model: step 3 samples responses with a "
            "key-value cache, which recurrent (state-space) models do not have"
        )


def require_vocabulary(path: str, tokenizer_size: int) -> None:
    """Raises: UserError if the tokenizer has many more ids than the model's config has rows."""
    rows = getattr(load_config(path).get_text_config(), "vocab_size", tokenizer_size)
    _refuse_other_tokenizer(path, rows, tokenizer_size)


def _refuse_other_tokenizer(path: str, rows: int, tokenizer_size: int) -> None:
    if tokenizer_size - rows > max(1, MOST_NEW * rows):
        raise UserError(
            f"model '{path}': its embedding has {rows} rows, but its tokenizer {tokenizer_size} ids; expected the "
            f"tokenizer of this model, or at most {MOST_NEW:.0%} more ids; use that tokenizer, or first train rows for "
            "all ids"
        )


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is loaded."""

    seed: int = 0
    """of the weights of a new model, which a YAML file describes"""
    shards: Shards | None = None
    """with them each rank has only its shard of the weights, and all ranks load together"""
    quantize: Quantize = "none"
    """bits of the matrices of the layers"""
    new_tokens: Mapping[int, list[int]] = field(default_factory=dict)
    """new ids, each with ids of which the mean is its row"""
    virtual_tokens: bool = False
    """whether a model may have virtual tokens, which no stage trains further"""


WHOLE = Loading()
"""Whole weights in the compute dtype."""


def load_causal_lm(path: str, dtype: torch.dtype, tokenizer_size: int, loading: Loading = WHOLE) -> PreTrainedModel:
    """A causal language model in `dtype`, in eval mode, that gives no probability to ids the tokenizer does not have.

    Its embeddings are at least `tokenizer_size` rows; new rows are the mean of the others, so that a new token is
    never likelier than an average one (drawn at random it can outweigh the whole vocabulary: GPT-2's logits are
    about -30). Rows beyond the tokenizer, which many models have, get logit -inf.
    Raises: UserError for missing, unexpected or misshapen weights, or a weight that is not finite.
    """
    model = _load(AutoModelForCausalLM, path, dtype, tokenizer_size, loading)
    lm_head.hide_from(model, tokenizer_size)
    if loading.shards is None:
        lm_head.detect(model)
    for name in ends.ignored(model):
        console.say(
            f"note: model '{path}': {name} of its generation_config.json is not used: a response ends in the "
            "tokenizer's end token or one of eos_token_id there"
        )
    return model


def load_backbone(path: str, dtype: torch.dtype, tokenizer_size: int, loading: Loading = WHOLE) -> PreTrainedModel:
    """The same model without its language-model head: ids to hidden states."""
    return _load(AutoModel, path, dtype, tokenizer_size, loading)


def _load(auto: Any, path: str, dtype: torch.dtype, tokenizer_size: int, loading: Loading) -> PreTrainedModel:
    config, source = load_config(path), resolve(path)
    _refuse_architecture(config, path)
    leave_out_requests(config, path)
    shards, quantize, new_tokens = loading.shards, loading.quantize, loading.new_tokens
    if is_adapter(Path(source)):
        if shards is not None or quantize != "none":
            other = "under ZeRO-3" if shards is not None else f"for --quantize {quantize}"
            raise UserError(
                f"model '{path}': got an adapter, expected whole weights {other}; make them with `rlhf export`"
            )
        base = adapter_files.base_of(source)
        if is_adapter(Path(base)):
            raise UserError(f"model '{path}': its base model '{base}' is an adapter too, expected whole weights")
        model = _load(auto, base, dtype, tokenizer_size, loading)
        saved = adapter_files.read_options(source, loading.virtual_tokens)
        if saved.is_prompt_learning:
            virtual_tokens.load(model, source, saved)
        else:
            adapter_files.merge(model, source)
        for name in ("eos_token_id", "pad_token_id"):  # which it does not share with its base model
            setattr(model.config, name, getattr(config, name, None))
        return model
    if source.endswith((".yaml", ".yml")):
        if quantize != "none":
            raise UserError(f"{path}: --quantize {quantize}: expected a trained model; a new one has random weights")
        # Whole on every rank even if it is sharded later: a new model has the same weights under any ZeRO stage.
        shards = None
        with torch.random.fork_rng():
            torch.manual_seed(loading.seed)
            model = auto.from_config(config, **attention_options(config)).to(dtype)
    else:
        # Loading into shards does not report missing or misshapen weights, so a model without storage is loaded first.
        device_map: dict[str, object] = {} if shards is None else {"device_map": {"": "meta"}}
        device_map |= quantized.load_options(quantize, dtype, collectives.local_device())
        options = {"config": config, "dtype": dtype, "trust_remote_code": False, "weights_only": True}
        options |= attention_options(config)
        # Our error names weights of another shape; that of transformers does not.
        report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with explain_load_errors(source):
            model, info = auto.from_pretrained(source, **report, **device_map, **options)
            refuse_adapter(path, model)
            refuse_whole_numbers(source, model)
        refuse_mismatch(path, info, HEADS if auto is AutoModel else None)
        if quantize != "none":
            quantized.complete(model, path, quantize)
        if shards is not None:
            with explain_load_errors(source), shards.building():
                model = auto.from_pretrained(source, **options)
    rows = model.get_input_embeddings().num_embeddings
    _refuse_other_tokenizer(path, rows, tokenizer_size - len(new_tokens))
    if rows < tokenizer_size:
        if rows < tokenizer_size - len(new_tokens) - 1:  # one is for padding
            console.say(
                f"note: model '{path}': {tokenizer_size - rows} rows are added to the {rows} of its embedding for ids "
                "that only its tokenizer has; each is the mean of the others"
            )
        with contextlib.nullcontext() if shards is None else shards.building():
            new_rows.add(model, tokenizer_size)
    if new_tokens:
        new_rows.set_to_means(model, new_tokens)
    refuse_non_finite(model, path)
    model.eval()
    kernels.install(model)
    packing.detect_support(model, shards is None)
    return model


def refuse_mismatch(path: str, info: Tree, ignored: re.Pattern[str] | None = None) -> None:
    """Raises: UserError if the weights are not exactly those of the architecture, `ignored` names apart."""
    unexpected = [name for name in info["unexpected_keys"] if ignored is None or not ignored.match(name)]
    mismatches = {"missing": sorted(info["missing_keys"]), "unexpected": sorted(unexpected)}
    problems = [
        f"{len(names)} weights are {kind} ({', '.join(names[:3])})" for kind, names in mismatches.items() if names
    ]
    for name, shape, expected in sorted(info["mismatched_keys"])[:1]:
        count = len(info["mismatched_keys"])
        problems.append(f"{count} weights have another shape ({name}: got {list(shape)}, expected {list(expected)})")
    if problems:
        raise UserError(f"model '{path}': {'; '.join(problems)}; expected those of its config.json")


def refuse_non_finite(model: nn.Module, path: str) -> None:
    """Raises UserError naming the first weight with a NaN or an infinity."""
    for name, weight in model.named_parameters():
        with gather_weights([weight]):
            finite = torch.isfinite(weight.sum(dtype=torch.float32)) or torch.isfinite(weight).all()
        if not finite:
            raise UserError(f"model '{path}': weight {name} has values that are not finite")
