"""What readers of the files of transformers 4 look for, beside what transformers 5 writes.

transformers 4, vLLM and llama.cpp's converter read `rope_theta` at the top of config.json; without it they take
10,000 without a word. transformers 5 keeps it in `rope_parameters`, and reads a file with both as before. It also names
a tokenizer class that version 4 does not have, and lists special tokens under a key for which version 4 expects a map.
"""

from pathlib import Path

from rlhf.config import Tree
from rlhf.storage import disk

KEYS = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
"""names of (rope_theta, partial_rotary_factor) in version 4, by model type, where they are others"""
LAYER_KEYS = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
"""names of rope_theta in version 4 where it depends on the layer, as in Gemma 3"""


def add_entries(directory: Path) -> None:
    """Add to the config and the tokenizer's config in a directory, if it has them, what readers of version 4 need."""
    config, tokenizer = directory / "config.json", directory / "tokenizer_config.json"
    if config.is_file():
        content = disk.read_json(config)
        _rewrite(config, content, {**content, **_rotation(content), **_nested(content)})
    if tokenizer.is_file():
        content = disk.read_json(tokenizer)
        _rewrite(tokenizer, content, _for_tokenizer(content))


def _rewrite(file: Path, before: Tree, after: Tree) -> None:
    if after != before:
        disk.write_json(file, after)


def _nested(content: Tree) -> Tree:
    text = content.get("text_config")
    return {"text_config": text | _rotation(text)} if isinstance(text, dict) else {}


def _rotation(config: Tree) -> Tree:
    """The entries for the position encoding of one config."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    if "rope_theta" not in rope:  # one for each kind of layer
        by_layer = {name: own for name, own in rope.items() if name in LAYER_KEYS and isinstance(own, dict)}
        entries = {LAYER_KEYS[name]: own["rope_theta"] for name, own in by_layer.items() if "rope_theta" in own}
        return entries | _scaling(by_layer.get("full_attention", {}))
    theta, part = KEYS.get(str(config.get("model_type")), ("rope_theta", "partial_rotary_factor"))
    entries = {theta: rope["rope_theta"]} | _scaling(rope)
    return entries | ({part: rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {})


def _scaling(rope: Tree) -> Tree:
    """`rope_scaling`, where positions are scaled."""
    if rope.get("rope_type", "default") == "default":
        return {}
    own = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    return {"rope_scaling": own}


def _for_tokenizer(content: Tree) -> Tree:
    after = dict(content)
    if after.get("tokenizer_class") == "TokenizersBackend":
        after["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(after.get("extra_special_tokens"), list):
        after["additional_special_tokens"] = after.pop("extra_special_tokens")
    return after
