"""Models with random weights in the shapes of OPT-1.3B and OPT-350M, and prompts for them, without a model hub."""

import json
from pathlib import Path
from typing import Any

import torch

from rlhf.distributed.collectives import local_device

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64}
ACTOR, REWARD = "opt-1.3b", "opt-350m"


def models(tiny: bool, folder: Path) -> tuple[str, str]:
    """Folders of (the policy, the reward model), made at the first call."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    paths = []
    for name, auto in ((ACTOR, AutoModelForCausalLM), (REWARD, AutoModelForSequenceClassification)):
        saved = folder / f"{'tiny-' * tiny}{name}"
        if not (saved / "config.json").is_file():
            description = saved.with_suffix(saved.suffix + ".yaml")
            _describe(description, name, tiny)
            _save(auto, description, saved)
        paths.append(str(saved))
    return paths[0], paths[1]


def _describe(path: Path, name: str, tiny: bool) -> None:
    """Write the YAML file of a model with the shape of `name` and the demo's tokenizer."""
    from rlhf.config import read_yaml
    from rlhf.plan.sizes import shapes
    from rlhf.shipped import CONFIGS

    small = TINY | {"vocab_size": 1000, "max_position_embeddings": 128} if tiny else {}
    tokenizer = read_yaml(CONFIGS / "models" / "demo-llama.yaml")["tokenizer"]
    values = {"model": shapes()[name] | small, "tokenizer": tokenizer}
    path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML


def _save(auto: Any, description: Path, folder: Path) -> None:
    """Save a model with random weights, which are drawn on the device: a CPU takes 20 s for 1.3 billion."""
    from rlhf.models.load import load_config
    from rlhf.text.tokenizer import load_tokenizer

    config = load_config(str(description))
    config.num_labels = 1
    torch.manual_seed(0)
    with local_device():
        model = auto.from_config(config)
    load_tokenizer(str(description)).save_pretrained(folder)
    model.to(dtype()).save_pretrained(folder)


def vocabulary(path: str) -> int:
    """Rows of the embedding."""
    from rlhf.models.load import load_config

    return int(load_config(path).vocab_size)


def prompt_items(count: int, tokens: int, ids: int) -> list[Any]:
    """Prompts of exactly `tokens` random ids below `ids`."""
    from data.prepare.encode import Prompt
    from rlhf.types import Message, Row

    drawn = torch.randint(4, ids, (count, tokens), generator=torch.Generator().manual_seed(0))
    return [Prompt(tuple(row), Row((Message("user", "tell me"),))) for row in drawn.tolist()]


def prompts(count: int, tokens: int, ids: int) -> Any:
    """The same as a batch."""
    from data.batches import prompt_batch

    return prompt_batch(prompt_items(count, tokens, ids), 0)


def dtype() -> torch.dtype:
    """The compute dtype of this device."""
    from rlhf.config.options import EngineOptions
    from rlhf.engine.precision import compute_dtype

    return compute_dtype(EngineOptions(), local_device())
