"""How many kernels a decode step launches on a GPU, by the code that torch's compiler writes for one."""

from typing import Any

import pytest
import torch

from rlhf.config.options import SamplingOptions
from rlhf.generation import _graphs, _memory, loop
from rlhf.kernels import attention, compiling, decoding
from rlhf.maths.uniforms import uniforms
from rlhf.models import packing
from tests.support import families, tiny

pytestmark = pytest.mark.kernels

ATTENTION, SPLITS = "torch.ops.rlhf.attend_one_token.default", 1
"""one kernel more joins the splits of long rows"""
STEP = 3
"""beside both graphs: the newest token is made visible, and the positions advance; where rows are few, the largest
logit is found in two"""
CHANGES: dict[str, dict[str, Any]] = {
    "opt": {"do_layer_norm_before": True, "word_embed_proj_dim": tiny.WIDTH},  # as all but opt-350m
    "gemma2": {"sliding_window": tiny.CONTEXT},
    "gemma3_text": {"sliding_window": tiny.CONTEXT},
}


@pytest.mark.parametrize(
    ("family", "most"),
    [("opt", 12), ("llama", 12), ("qwen3", 12), ("gemma2", 14), ("gemma3_text", 14)],
)
def test_a_decode_step_launches_few_kernels(family: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: at most so many in a layer, and 20 outside of all layers, sampling included.

    It counts the launches in the program that the compiler writes for an H100, for tensors of these shapes. It does
    not prove that the program runs there, how long its kernels take, or that cuBLAS launches one kernel a product: for
    few rows and a wide input it may add a second that joins parts of a sum. The tiny width is one block of a norm,
    where a real one takes a loop in the same kernel.
    """
    pytest.importorskip("triton", reason="triton is not installed: make test-kernels brings it")
    from rlhf.kernels import one_token_triton
    from tests.support import code_for_gpus

    lm = tiny.causal_lm(family, **{**families.ALL[family], **CHANGES.get(family, {}), "vocab_size": 50_000}).bfloat16()
    attention.install(lm)
    packing.detect_support(lm, unsharded=True)
    monkeypatch.setattr(_graphs, "recorder", lambda _: lambda step: step)
    monkeypatch.setattr(_memory, "ROUNDED", 8)  # attention reads a part of the cache, which must not be copied
    monkeypatch.setattr(decoding, "_on_cpu", lambda _: False)
    monkeypatch.setattr(attention, "one_token", one_token_triton.attend)
    compiling.compile_as_one_graph.cache_clear()
    torch._dynamo.reset()
    decoding.compile_decoding(lm)
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    draws = uniforms([(0, row) for row in range(3)], 4)
    with code_for_gpus.launches() as graphs:
        backend(lm, tiny.prompts([3, 5, 2]), SamplingOptions(response_length=4), draws)
    compiling.compile_as_one_graph.cache_clear()
    step, sampling = graphs
    first, second = (i for i, name in enumerate(step) if name == ATTENTION)
    layer = second - first
    outside = len(step) - 2 * layer + len(sampling) + STEP
    assert layer + SPLITS <= most, step[first:second]
    assert outside <= 20, (step, sampling)
