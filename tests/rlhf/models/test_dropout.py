"""--dropout: the dropout that transformers computes of a config, in training only; an exported config has 0."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf.models.load import remove_randomness, set_dropout
from tests.support import tiny

SHARE = 0.3
NAMES: dict[str, tuple[str, ...]] = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "opt": ("dropout", "attention_dropout"),
    "llama": ("attention_dropout",),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "gpt_neo": ("embed_dropout", "resid_dropout", "attention_dropout"),
    "gptj": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
}


@pytest.mark.parametrize("family", NAMES)
def test_it_is_the_dropout_of_transformers(family: str) -> None:
    """The same random numbers drop the same activations, to the bit."""
    ids = torch.arange(4, 4 + 24).view(2, 12)
    config = tiny.config_of(family)
    remove_randomness(config)
    ours = tiny.causal_lm(family, **dict.fromkeys(NAMES[family], 0.0))
    theirs: Any = AutoModelForCausalLM.from_config(tiny.config_of(family, **dict.fromkeys(NAMES[family], SHARE)))
    theirs.load_state_dict(ours.state_dict())
    set_dropout(ours, SHARE, family)
    logits = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        logits.append(model.train()(ids).logits)
        again = model(ids).logits
        assert not torch.equal(logits[-1], again)
        assert torch.equal(model.eval()(ids).logits, model(ids).logits)
    assert torch.equal(*logits)
    exported = ours.config.to_dict()
    assert all(exported[name] == 0.0 for name in NAMES[family])


def test_a_model_without_dropout_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    set_dropout(nn.Linear(2, 2), SHARE, "m")
    assert "note: --dropout 0.3 has no effect: the architecture of model 'm' has no dropout" in capsys.readouterr().out
