"""Operations in C++ beside the formula in fp64."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf.generation import loop
from rlhf.models import compiling, kernels
from rlhf.models.load import load_causal_lm
from rlhf.options import SamplingOptions
from tests import tiny

DTYPES = [torch.float32, torch.bfloat16]


def needed(dtype: torch.dtype) -> None:
    if shutil.which("g++") is None or not kernels.usable(dtype):
        pytest.skip(f"no C++ compiler here, or no block products of {dtype}")


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def agree(found: Tensor, exact: Tensor) -> None:
    """In bf16 as near as rounding the exact result comes."""
    relative, absolute = (2.0**-8, 1e-4) if found.dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * relative, atol=absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 33, 70])
@pytest.mark.parametrize(("inner", "outputs"), [(2, (1,)), (40, (50,)), (64, (32, 7, 7)), (66, (31, 100))])
def test_products_are_those_of_each_weight_beside_each_other(
    tokens: int, inner: int, outputs: tuple[int, ...], dtype: torch.dtype
) -> None:
    needed(dtype)
    x = drawn(tokens, 1, inner, dtype=dtype)
    weights = [drawn(n, inner, dtype=dtype) for n in outputs]
    biases = [drawn(n, dtype=dtype) for n in outputs]
    exact = torch.cat([x.double() @ w.double().mT for w in weights], -1)
    agree(kernels.products(x, weights, []), exact)
    agree(kernels.products(x.expand(tokens, 2, inner)[:, 1:], weights, biases), exact + torch.cat(biases).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 64, 80, 128])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 2), (9, 3), (8, 1), (7, 1)])
def test_one_token_attends_to_what_it_sees(heads: int, groups: int, size: int, dtype: torch.dtype) -> None:
    needed(dtype)
    rows, room = 4, 37
    q = drawn(rows, 1, heads, size, dtype=dtype).transpose(1, 2)
    k, v = (drawn(rows, groups, room, size + i, dtype=dtype)[..., i:].contiguous() for i in range(2))
    seen = torch.ones(rows, 1, 1, room, dtype=torch.bool)
    seen[0, ..., :5], seen[1, ..., 30:], seen[2, ..., 3:20:2], seen[3, ..., 1:] = False, False, False, False
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), seen, scale=0.3, enable_gqa=True
    )
    agree(kernels.attend(q, k, v, seen, 0.3), exact.transpose(1, 2))


def test_other_numbers_and_odd_sizes_do_not_fit() -> None:
    assert kernels.fits(torch.empty(3, 5), torch.empty(2, 4, dtype=torch.bfloat16))
    assert not kernels.fits(torch.empty(3, 4), torch.empty(2, 5, dtype=torch.bfloat16))
    assert not kernels.fits(torch.empty(3, 4, dtype=torch.float16))
    assert not kernels.usable(torch.float16)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_without_them_tokens_are_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed(torch.float32)
    tiny.causal_lm(family, std=0.05).save_pretrained(tmp_path / "model")
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    draws = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    lm = load_causal_lm(str(tmp_path / "model"), torch.float32, tiny.VOCAB)
    compiling.compile_layers(lm)
    with_them = backend(lm, tiny.prompts([3, 9, 5]), SamplingOptions(response_length=8), draws)
    monkeypatch.setattr(kernels, "usable", lambda _: False)
    without = backend(lm, tiny.prompts([3, 9, 5]), SamplingOptions(response_length=8), draws)
    torch._dynamo.reset()
    assert torch.equal(with_them.response_ids, without.response_ids)
    torch.testing.assert_close(with_them.sampled_logprobs, without.sampled_logprobs, rtol=0, atol=1e-5)
    assert not torch.equal(with_them.sampled_logprobs, without.sampled_logprobs)


def test_where_the_source_does_not_compile_it_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    (tmp_path / "kernels.cpp").write_text("no C++")
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    kernels.usable.cache_clear(), kernels._compiled.cache_clear()
    try:
        with pytest.warns(UserWarning, match="kernels.cpp does not compile, so tokens are sampled more slowly"):
            assert not kernels.usable(torch.float32)
        assert not kernels.usable(torch.bfloat16)
    finally:
        kernels.usable.cache_clear(), kernels._compiled.cache_clear()
