"""The attention of one token on GPUs, without one: Triton's interpreter runs the kernels, its compiler builds them.

The interpreter multiplies bf16 as integers, so values are compared in fp32 and fp16.
"""

import json
import os
import subprocess
import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from rlhf.config.options import SamplingOptions
from rlhf.generation import loop
from rlhf.kernels import attention
from rlhf.maths.uniforms import uniforms
from tests.support import families, tiny

pytestmark = pytest.mark.kernels


@pytest.fixture
def kernel() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed: make test-kernels brings it")
    assert os.environ["TRITON_INTERPRET"] == "1", "make test-kernels sets it, before triton is imported"
    from rlhf.kernels import one_token_triton

    return one_token_triton


GROUPED = "two splits, grouped queries"
SHAPES = {  # rows, heads, key heads, keys, width, width of the values
    "a tile larger than all keys": (3, 4, 4, 37, 16, 16),
    GROUPED: (2, 8, 2, 300, 64, 64),
    "seven splits would be too many": (1, 4, 1, 1000, 80, 80),
    "no power of 2; other values": (2, 6, 3, 257, 24, 16),
    "the widest heads": (5, 4, 4, 33, 256, 256),
    "more queries than a tile": (2, 32, 1, 70, 8, 8),
}


def runs(rows: int, keys: int) -> Tensor:
    """A mask of longer rows than `keys`: ragged runs, of one key in the second row; the last row has a gap."""
    visible = torch.zeros(rows, 1, 1, keys + 3, dtype=torch.bool)
    for row in range(rows):
        start = 11 * row % (keys // 2)
        visible[row, ..., start : keys - 2 * row] = True
        visible[row, ..., start + 1 : start + 3] = row < rows - 1
    if rows > 1:
        visible[1] = False
        visible[1, ..., keys // 2] = True
    return visible


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "cap"), [*((shape, 0.0) for shape in SHAPES.values()), (SHAPES[GROUPED], 0.5)])
def test_it_is_the_attention_in_float64(
    kernel: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, cap: float
) -> None:
    """Each result is a mean of values with weights that add up to 1: it is off by what rounding moves the weights (of
    exp, and to the dtype), and the mean: 4 roundings of the largest value."""
    rows, heads, key_heads, keys, d_k, d_v = shape
    q = torch.randn(rows, heads, 1, d_k, dtype=dtype)
    k = torch.randn(rows, key_heads, keys + 7, d_k, dtype=dtype)[:, :, :keys]  # of a larger cache
    v = torch.randn(rows, keys, key_heads, d_v, dtype=dtype).transpose(1, 2)
    for visible in (runs(rows, keys), runs(1, keys), None):
        got = kernel.attend(q, k, v, visible, d_k**-0.5, cap)
        want = attention.one_token(q.double(), k.double(), v.double(), visible, d_k**-0.5, cap)
        assert got.dtype == dtype and got.shape == want.shape
        # the scores, sums of d_k products, are computed in fp32
        bound = 4 * torch.finfo(dtype).eps + 4 * d_k * torch.finfo(torch.float32).eps
        assert (got - want).abs().max() <= bound * v.abs().max()


def test_what_is_not_seen_is_not_read(kernel: ModuleType) -> None:
    q, visible = torch.randn(2, 4, 1, 16), runs(2, 300)
    k, v = torch.randn(2, 2, 2, 300, 16)
    want = attention.one_token(q, k, v, visible, 0.25)
    hidden = ~visible[..., :300, None].expand(2, 2, 1, 300, 1).squeeze(2)
    k, v = (x.masked_fill(hidden, torch.nan) for x in (k, v))
    torch.testing.assert_close(kernel.attend(q, k, v, visible, 0.25), want)


@pytest.mark.parametrize("family", families.ALL)
def test_a_family_samples_with_it_as_without(kernel: ModuleType, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal prompts, in fp32. A family whose attention is not ours does not call it."""
    lm = tiny.causal_lm(family, **({} if family in tiny.FAMILIES else families.ALL[family]))
    attention.install(lm)
    sampling = SamplingOptions(response_length=6)
    prompts, numbers = tiny.prompts([3, 9, 8]), uniforms([(0, row) for row in range(3)], 6)
    backend = loop.Loop(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    want, calls = backend(lm, prompts, sampling, numbers), Mock(side_effect=kernel.attend)
    monkeypatch.setattr(attention, "one_token", calls)
    got = backend(lm, prompts, sampling, numbers)
    assert calls.called == attention.installed(lm)
    assert got.response_ids.equal(want.response_ids)
    torch.testing.assert_close(got.sampled_logprobs, want.sampled_logprobs, atol=1e-5, rtol=0)


def test_a_kernel_that_is_wrong_here_is_not_used(kernel: ModuleType, recwarn: pytest.WarningsRecorder) -> None:
    """As of bf16 in the interpreter."""
    cpu = torch.device("cpu")
    assert attention._agrees(kernel.attend, cpu, torch.float16)
    assert attention._one_token_in_triton(cpu) is None
    assert "its results are wrong" in str(recwarn.pop(UserWarning).message)


def test_they_compile_for_gpus_without_spills() -> None:
    """Keys and values come by 16 bytes; at most 96 registers and 48 kB, so that several programs share a processor."""
    pytest.importorskip("triton", reason="triton is not installed: make test-kernels brings it")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "tests.support.compiled_kernels"]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    kernels = [json.loads(line) for line in found.stdout.splitlines()]
    assert {each["target"] for each in kernels} == {"sm_80", "sm_90a", "sm_100a"}
    for each in kernels:
        assert each["spilled"] == 0 and each["registers"] <= 96 and each["shared"] <= 48 * 1024, each
        assert set(each["copies"]) == ({"16"} if each["name"] == "attend_split" else set()), each
