"""Tiny random models of many families, a tokenizer of words for them, and one process as a group of ranks."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf.config.options import EngineOptions, OptimizerOptions, TrainingOptions
from rlhf.distributed import collectives
from rlhf.models import packing
from rlhf.models.traits import attention_options
from rlhf.text.templates import BUILT_IN
from rlhf.types import Message, Prompts, Row, Sequences

VOCAB, WIDTH, CONTEXT = 97, 32, 64
PAD, BOS, EOS = 0, 1, 2
ORDERS = 4 * math.sqrt(15 * 64 / 12) * torch.finfo(torch.float32).eps
"""4.3e-6: how far apart two orders of additions leave a score of these models, as a share of the sizes of its terms
added up. It is the last of 15 sums one after the other (7 products in each of 2 layers, and the head) of at most 64
numbers; each addition is off by at most eps / 2 either way, eps / sqrt(12) in the root of the mean square; 4 standard
errors of all 15 x 64 together."""

WORDS = [f"w{i}" for i in range(4, VOCAB)]

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {  # as opt-350m: projections around the layers, layer norm after; one id for BOS, EOS and padding
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "word_embed_proj_dim": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "max_position_embeddings": CONTEXT,
        "do_layer_norm_before": False,
        "bos_token_id": EOS,
        "pad_token_id": EOS,
        "dropout": 0.1,
    },
    "gpt2": {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT},
    "gpt_neo": {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": CONTEXT,
    },
    "gptj": {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT, "rotary_dim": 4},
    "llama": _GROUPED,
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": {**_GROUPED, "head_dim": 8},
    "bloom": {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_head": 4, "n_layer": 2},
    "gpt_neox": _COMMON,
    "mistral": {**_GROUPED, "sliding_window": 8},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "gemma2": {**_GROUPED, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
}
"""Configs by model type. GPT-2 and OPT come with dropout; the windows are shorter than the tests' sequences."""

LATENT = {  # keys and values of unequal width, and neither is what the cache holds
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""The config of a deepseek_v3."""

NESTED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": FAMILIES["gemma2"],
        "vision_config": {
            "hidden_size": WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
    }
}
"""Those whose config holds others."""


def config_of(family: str, **changes: Any) -> Any:
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return AutoConfig.for_model(family, **{**special, **(FAMILIES | NESTED).get(family, {}), **changes})


def causal_lm(family: str = "llama", std: float = 0.2, **changes: Any) -> PreTrainedModel:
    """A language model in eval mode with weights N(0, std); at 0.2 its next tokens are far from uniform."""
    return _filled(AutoModelForCausalLM, family, std, **changes)


def backbone(family: str = "llama", std: float = 0.2, **changes: Any) -> PreTrainedModel:
    return _filled(AutoModel, family, std, **changes)


def _filled(auto: Any, family: str, std: float, **changes: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = config_of(family, **changes)
        model = auto.from_config(config, **attention_options(config)).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0.0, std)
    return model


def tokenizer(words: Sequence[str] = tuple(WORDS), reverse: bool = False) -> PreTrainedTokenizerFast:
    """The special ids above and `words`, or all of them in reverse; the template writes BOS, then the messages."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *words]
    ids = {word: i for i, word in enumerate(reversed(vocabulary) if reverse else vocabulary)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    result.chat_template = BUILT_IN["plain"]
    return result


def unpacked(model: Any) -> Any:
    """The same model, which reads every row padded."""
    setattr(getattr(model, "backbone", model), packing.LONGEST, 0)
    return model


def sequences(lengths: list[int], prompts: list[int], width: int | None = None, seed: int = 0) -> Sequences:
    """Right-padded random rows of `lengths` tokens whose first `prompts` do not count; pads have a real token's id."""
    width = width or max(lengths)
    ids = torch.randint(4, VOCAB, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    columns = torch.arange(width)
    mask = columns < torch.tensor(lengths)[:, None]
    return Sequences(ids, mask, mask & (columns >= torch.tensor(prompts)[:, None]))


def padded(rows: Sequences, left: int, right: int, fill: int = EOS) -> Sequences:
    """The same rows with more padding, of id `fill`, on both sides."""

    def pad(x: Tensor, value: int) -> Tensor:
        return nn.functional.pad(x, (left, right), value=value)

    return Sequences(pad(rows.ids, fill), pad(rows.mask, 0), pad(rows.loss_mask, 0))


def prompts(lengths: list[int], seed: int = 0) -> Prompts:
    """Left-padded prompts, BOS and words, with rows that say the same in text."""
    width = max(lengths)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (len(lengths), width), generator=draw)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    ids[torch.arange(len(lengths)), width - torch.tensor(lengths)] = BOS
    texts = [" ".join(f"w{i}" for i in row[mask_row][1:].tolist()) for row, mask_row in zip(ids, mask, strict=True)]
    return Prompts(ids.masked_fill(~mask, PAD), mask, tuple(Row((Message("user", text),)) for text in texts))


def training_options(engine: EngineOptions, optimizer: OptimizerOptions) -> TrainingOptions:
    """Both as the options of one trained model."""
    return TrainingOptions(**engine.model_dump(), **optimizer.model_dump())


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone; the environment is as before when it ends, and it can be had again."""
    before = dict(os.environ)
    try:
        with collectives.process_group():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
