"""rlhf/models/traits.py: what the project asks of the shape of transformers' classes, in the installed version."""

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from rlhf.models import traits
from tests.support import families, tiny


def of(family: str, sizes: dict[str, Any]) -> tuple[Any, Any]:
    config = AutoConfig.for_model(family, **sizes)
    return traits.class_of(AutoModelForCausalLM, config), config


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_a_family_with_attention_has_a_key_value_cache(family: str) -> None:
    model, config = of(family, tiny.FAMILIES[family])
    assert traits.has_key_value_cache(model, config)


@pytest.mark.parametrize("family", sorted(families.RECURRENT))
def test_a_recurrent_family_has_none(family: str) -> None:
    model, config = of(family, families.RECURRENT[family])
    assert not traits.has_key_value_cache(model, config)


def test_the_cache_is_filled_through_the_argument_that_is_found() -> None:
    """By its name alone: a decorator of transformers takes the old name and warns."""
    lm, cache = tiny.causal_lm(), DynamicCache()
    lm(torch.ones(1, 3, dtype=torch.long), **traits.cache_input(lm, cache), use_cache=True)
    assert cache.get_seq_length() == 3
    (name,) = traits.cache_input(lm, cache)
    assert name in inspect.signature(type(lm.base_model).forward).parameters


def test_classes_are_found_by_the_config() -> None:
    config = tiny.config_of("llama")
    assert traits.class_of(AutoModelForCausalLM, config).__name__ == "LlamaForCausalLM"
    assert traits.class_of(AutoModelForSequenceClassification, config).__name__ == "LlamaForSequenceClassification"
    t5 = AutoConfig.for_model("t5")
    assert traits.class_of(AutoModelForCausalLM, t5) is None
