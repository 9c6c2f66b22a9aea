"""Tiny random configs of the families of language models that people train, beside those of tests/support/tiny.py."""

from typing import Any

from tests.support.tiny import CONTEXT, FAMILIES, LATENT, VOCAB, WIDTH

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
}
_EXPERTS = {**_COMMON, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}

ALL: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "falcon": {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": CONTEXT,
    },
    "mpt": {"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "gpt_bigcode": {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT},
    "qwen3_moe": _EXPERTS,
    "gemma": {**_COMMON, "head_dim": 8},
    "gemma3_text": {**_COMMON, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi": {**_COMMON, "num_key_value_heads": 4},
    "phi3": _COMMON,
    "glm": {**_COMMON, "head_dim": 8},
    "glm4": {**_COMMON, "head_dim": 8},
    "stablelm": _COMMON,
    "cohere": _COMMON,
    "cohere2": {**_COMMON, "sliding_window": 8},
    "olmo2": _COMMON,
    "olmoe": {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": _COMMON,
    "granite": _COMMON,
    "starcoder2": {**_COMMON, "sliding_window": None},
    "nemotron": {**_COMMON, "head_dim": 8},
    "ernie4_5": {**_COMMON, "head_dim": 8},
    "exaone4": {**_COMMON, "sliding_window": 8},
    "seed_oss": {**_COMMON, "head_dim": 8},
    "helium": {**_COMMON, "head_dim": 8},
    "gpt_oss": {**_COMMON, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_5_text": {
        **_COMMON, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "lfm2": {**_COMMON, "layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "block_multiple_of": 8},
    "deepseek_v2": {**LATENT, "n_shared_experts": 1, "topk_method": "greedy", "first_k_dense_replace": 1},
    "deepseek_v3": LATENT,
}  # fmt: skip
"""Configs by model type."""
WINDOWED = {"cohere2", "exaone4", "gemma3_text", "mistral"}
"""Those that pack rows up to their window."""
RECURRENT: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {**_COMMON, "num_hidden_layers": 3, "lru_width": WIDTH, "attention_window_size": 64},
    "mamba": {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4},
    "rwkv": {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": CONTEXT},
}
"""Those without a key-value cache, or whose layers read padding: step 3 refuses them."""
