"""Saved models as a reader of transformers 4 sees them; none is installed here, so its rules are written down."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf.config.options import TrainingOptions
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.old_readers import add_entries
from rlhf.engine.training import Engine
from rlhf.models.head import ScoreHead
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel
from tests.support import tiny

LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_theta": 5e5, "rope_type": "default"}),
    "llama 3": ("llama", {"rope_theta": 5e5, **LLAMA_3, "original_max_position_embeddings": 16}),
    "gpt_neox": ("gpt_neox", {"rope_theta": 3e4, "rope_type": "default", "partial_rotary_factor": 0.5}),
    "linear": ("qwen2", {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}),
}


def version_4_frequencies(config: dict[str, Any]) -> Tensor:
    """The inverse frequencies, from the keys and with the defaults of version 4.

    Of llama3 (Llama 3.1): wave lengths above the original context are divided by the factor, those between are blended.
    """
    neox = config["model_type"] == "gpt_neox"
    theta = config.get("rotary_emb_base" if neox else "rope_theta", 10_000.0)
    part = config.get("rotary_pct" if neox else "partial_rotary_factor", 0.25 if neox else 1.0)
    width = int(config["hidden_size"] // config["num_attention_heads"] * part)
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    waves, context = 2 * torch.pi / frequencies, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = ((context / waves - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / scaling["factor"] + share * frequencies


@pytest.mark.parametrize("case", CASES)
def test_positions_are_those_of_version_4_and_5(case: str, tmp_path: Path) -> None:
    family, rope = CASES[case]
    lm = tiny.causal_lm(family, rope_parameters=dict(rope))
    expected = lm.base_model.rotary_emb.inv_freq
    before = lm.config.to_dict()["rope_parameters"]
    with tiny.one_rank():
        policy = Engine(Policy(lm), TrainingOptions(dtype="fp32"), 1)
        save_policy(policy, None, tiny.tokenizer(), tmp_path / "policy")
        head = ScoreHead(torch.ones(1, tiny.WIDTH))
        backbone = tiny.backbone(family, rope_parameters=dict(rope))
        scalar = Engine(ScalarModel(backbone, head), TrainingOptions(dtype="fp32"), 1)
        (tmp_path / "scalar").mkdir()
        save_scalar(scalar, None, tiny.tokenizer(), tmp_path / "scalar")
    for folder in (tmp_path / "policy", tmp_path / "scalar"):
        content = json.loads((folder / "config.json").read_text())
        torch.testing.assert_close(version_4_frequencies(content), expected, rtol=1e-5, atol=0)
        again = AutoConfig.from_pretrained(folder)
        assert again.to_dict()["rope_parameters"] == before
        for key in ("rope_theta", "rope_scaling", "rotary_emb_base"):
            content.pop(key, None)
        (folder / "config.json").write_text(json.dumps(content))
        assert AutoConfig.from_pretrained(folder).to_dict() == again.to_dict()  # version 5 reads them as without
    now = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.equal(now.base_model.rotary_emb.inv_freq, expected)


def test_the_text_model_inside_a_larger_one_has_them_too(tmp_path: Path) -> None:
    """The config of a model with a vision tower has that of its language model inside."""
    rope = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    config = {"model_type": "gemma3", "text_config": {"rope_parameters": rope, "hidden_size": 8}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    add_entries(tmp_path)
    added = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    expected = config | {"text_config": {"rope_parameters": rope, "hidden_size": 8, **added}}
    assert json.loads((tmp_path / "config.json").read_text()) == expected


def test_the_tokenizer_is_of_a_class_that_version_4_has(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w5", "w6"]})
    with tiny.one_rank():
        policy = Engine(Policy(tiny.causal_lm()), TrainingOptions(dtype="fp32"), 1)
        save_policy(policy, None, tokenizer, tmp_path)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(content.get("extra_special_tokens"), list)  # version 4 asks it for its keys
    assert content["additional_special_tokens"] == ["w5", "w6"]
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again("w4 w5").input_ids == tokenizer("w4 w5").input_ids
    assert (again.chat_template, again.pad_token, again.eos_token) == (tokenizer.chat_template, "<pad>", "</s>")
