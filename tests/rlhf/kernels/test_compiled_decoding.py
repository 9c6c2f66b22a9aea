"""Decode steps that are compiled for a GPU, on a CPU and as they were traced: the numbers of steps that are not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx
from transformers import PreTrainedModel

from rlhf.config.options import SamplingOptions
from rlhf.generation import _graphs, loop
from rlhf.kernels import attention, compiling, decoding
from rlhf.models import lm_head, packing
from tests.support import families, tiny

pytestmark = pytest.mark.compiled

NEAR = 1e-5
"""log-probs of tiny models in fp32, whose products add up in another order"""
JOINT = {"llama": [3, 2, 3, 2], "opt": [3, 3], "qwen2": [3, 2, 3, 2]}
"""weights of the joint products of two layers: queries, keys and values; gate and up"""
LONG = sorted(families.ALL.keys() - JOINT.keys())


@pytest.fixture(autouse=True)
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "_on_cpu", lambda _: False)
    monkeypatch.setattr(_graphs, "recorder", lambda _: lambda step: step)
    compiling.compile_as_one_graph.cache_clear()
    compiling._warn_once.cache_clear()
    yield
    compiling.compile_as_one_graph.cache_clear()
    torch._dynamo.reset()


def model(family: str) -> PreTrainedModel:
    """One whose last id the tokenizer does not have: its logit is -inf."""
    lm = tiny.causal_lm(family, **families.ALL[family])
    attention.install(lm)
    packing.detect_support(lm, unsharded=True)
    lm_head.hide_from(lm, tiny.VOCAB - 1)
    return lm


def sample(lm: PreTrainedModel) -> Any:
    """Two rollouts of ragged rows, of which some end early."""
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    draws = torch.rand(5, 12, generator=torch.Generator().manual_seed(0))
    rows = ([3, 9, 5, 7], [2, 4, 11, 3, 6])
    return [backend(lm, tiny.prompts(each), SamplingOptions(response_length=12), draws[: len(each)]) for each in rows]


def require_equal(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x.response_ids, y.response_ids) and torch.equal(x.mask, y.mask)
        torch.testing.assert_close(x.sampled_logprobs, y.sampled_logprobs, rtol=0, atol=NEAR)


def joint_products(graphs: list[torch.fx.Graph]) -> list[int]:
    """Of how many weights each product of the first graph is."""
    return [len(node.args[1]) for node in graphs[0].nodes if "joined_products" in str(node.target)]  # type: ignore[arg-type]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """Those that are compiled, in the end; they run as they were traced."""
    found: list[torch.fx.Graph] = []
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda module, *_, **__: (found.append(module.graph), module.forward)[1]
    )
    return found


@pytest.mark.parametrize("family", [*JOINT, *(pytest.param(x, marks=pytest.mark.long) for x in LONG)])
def test_a_family_samples_the_same(family: str, graphs: list[torch.fx.Graph], recwarn: pytest.WarningsRecorder) -> None:
    """A family that is padded, or that the compiler refuses, keeps its steps."""
    lm = model(family)
    want = sample(lm)
    decoding.compile_decoding(lm)
    require_equal(sample(lm), want)
    if family in JOINT:
        assert not [warning for warning in recwarn if "uncompiled" in str(warning.message)]
        assert [weights for weights in joint_products(graphs) if weights > 1] == JOINT[family]


def test_models_that_train_and_adapters_that_change_are_followed(graphs: list[torch.fx.Graph]) -> None:
    """Weights change in place; adapters of frozen weights are joined among themselves."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    lm = model("llama")
    inject_adapter_in_model(LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"]), lm)
    tuners = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    wanted = []
    for compiled in (False, True):
        if compiled:
            decoding.compile_decoding(lm)
        results = []
        for on, factor in ((True, 1.0), (False, 1.1), (True, 1 / 1.1)):
            for tuner in tuners:
                tuner.enable_adapters(on)
            with torch.no_grad():
                lm.model.layers[0].mlp.up_proj.weight.mul_(factor)
            results += sample(lm)
        wanted.append(results)
    require_equal(wanted[1], wanted[0])
    assert sorted(joint_products(graphs))[-4:] == [2, 2, 3, 3]


def test_a_graph_with_wrong_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: torch.fx.GraphModule, *_: object, **__: object) -> Any:
        def run(*inputs: object) -> Any:
            return [x.roll(1, -1) if isinstance(x, Tensor) and x.is_floating_point() else x for x in module(*inputs)]

        return run

    lm = model("llama")
    want = sample(lm)
    decoding.compile_decoding(lm)
    monkeypatch.setattr(compile_fx, "compile_fx", wrong)
    with pytest.warns(UserWarning, match="a decode step runs uncompiled: its results are wrong"):
        got = sample(lm)
    require_equal(got, want)
