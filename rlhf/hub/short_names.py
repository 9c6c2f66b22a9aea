"""Short model names, as people type them, and the hub ids that they stand for."""

from pathlib import Path

from rlhf.config import suggest
from rlhf.shipped import CONFIGS

FAMILIES = {
    "facebook/opt-{}": "125m 350m 1.3b 2.7b 6.7b 13b 30b 66b",
    "openai-community/{}": "gpt2 gpt2-medium gpt2-large gpt2-xl",
    "EleutherAI/pythia-{}": "14m 31m 70m 160m 410m 1b 1.4b 2.8b 6.9b 12b",
    "EleutherAI/{}": "gpt-neo-125m gpt-neo-1.3B gpt-neo-2.7B gpt-j-6b gpt-neox-20b",
    "bigscience/{}": "bloom bloom-560m bloom-1b1 bloom-1b7 bloom-3b bloom-7b1 bloomz-560m bloomz-1b1 bloomz-7b1",
    "HuggingFaceTB/SmolLM2-{}": "135M 360M 1.7B 135M-Instruct 360M-Instruct 1.7B-Instruct",
    "meta-llama/Llama-2-{}-hf": "7b 13b 70b 7b-chat 13b-chat 70b-chat",
    "meta-llama/Llama-3.2-{}": "1B 3B 1B-Instruct 3B-Instruct",
    "meta-llama/Llama-3.1-{}": "8B 70B 8B-Instruct 70B-Instruct",
    "TinyLlama/{}": "TinyLlama-1.1B-Chat-v1.0",
    "Qwen/Qwen2.5-{}": "0.5B 1.5B 3B 7B 14B 32B 72B 0.5B-Instruct 1.5B-Instruct 3B-Instruct 7B-Instruct",
    "Qwen/Qwen3-{}": "0.6B 1.7B 4B 8B 14B 32B 0.6B-Base 1.7B-Base 4B-Base 8B-Base",
    "mistralai/Mistral-7B-{}": "v0.1 v0.3 Instruct-v0.3",
    "google/gemma-2-{}": "2b 9b 27b 2b-it 9b-it 27b-it",
    "google/gemma-3-{}": "270m 270m-it 1b-pt 1b-it 4b-pt 4b-it 12b-pt 12b-it",
    "HuggingFaceTB/SmolLM3-{}": "3B 3B-Base",
    "zai-org/{}": "GLM-4-9B-0414 glm-4-9b-hf glm-4-9b-chat-hf",
}
"""Hub ids by family. The short name is the part after the owner; upper and lower case are equal."""

PRESETS = {"demo-llama": CONFIGS / "models/demo-llama.yaml"}
"""Models that a YAML file of this repository describes, with random weights."""


def known_names() -> dict[str, str]:
    """Hub id or path by short name, in lower case."""
    ids = [pattern.format(size) for pattern, sizes in FAMILIES.items() for size in sizes.split()]
    names = {model_id.split("/")[1].lower(): model_id for model_id in ids}
    # Llama names are also known without '-hf'.
    names |= {name.removesuffix("-hf"): model_id for name, model_id in names.items()}
    return names | {name: str(path) for name, path in PRESETS.items()}


def suggestion(model_id: str) -> str:
    """` (did you mean 'opt-1.3b'?)` if a short name is similar, else an empty string."""
    return "" if "/" in model_id else suggest(model_id.lower(), list(known_names()), cutoff=0.8)


def resolve(name: str) -> str:
    """The path or hub id of a model: an existing path and a hub id do not change, a short name becomes its hub id.

    >>> resolve("opt-1.3b")
    'facebook/opt-1.3b'
    """
    return name if Path(name).exists() else known_names().get(name.lower(), name)


def short_name(name: str) -> str:
    """The short name of a hub id, in lower case; another name does not change, except for its case.

    >>> short_name("facebook/opt-1.3b"), short_name("Llama-2-7b-hf")
    ('opt-1.3b', 'llama-2-7b')
    """
    ids = known_names()
    short_by_id = {model_id.lower(): short for short, model_id in ids.items()}
    return short_by_id.get(ids.get(name.lower(), name).lower(), name.lower())
