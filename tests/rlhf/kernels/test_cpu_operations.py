"""Operations in C++ beside the formula in fp64."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.kernels import attention, compiling, cpu_operations
from rlhf.models import packing
from rlhf.models.policy import Policy
from rlhf.types import Sequences
from tests.support import tiny

pytestmark = pytest.mark.compiled

DTYPES = [torch.float32, torch.bfloat16]


def needed(dtype: torch.dtype, usable: Callable[[torch.dtype], bool] = cpu_operations.for_one_token) -> None:
    if shutil.which("g++") is None or not usable(dtype):
        pytest.skip(f"no C++ compiler here, or no block products of {dtype}")


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def agree(actual: Tensor, exact: Tensor) -> None:
    """In bf16 as near as rounding the exact result comes."""
    relative, absolute = (2.0**-8, 1e-4) if actual.dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(actual.double(), exact, rtol=1.01 * relative, atol=absolute)


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
    agree(cpu_operations.products(x, weights, []), exact)
    wide = x.expand(tokens, 2, inner)[:, 1:]
    agree(cpu_operations.products(wide, weights, biases), exact + torch.cat(biases).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 64, 80, 128])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 2), (9, 3), (8, 1), (7, 1)])
def test_one_token_attends_to_what_it_sees(heads: int, groups: int, size: int, dtype: torch.dtype) -> None:
    needed(dtype)
    rows, room = 4, 37
    q = drawn(rows, 1, heads, size, dtype=dtype).transpose(1, 2)
    k, v = (drawn(rows, groups, room, size + i, dtype=dtype)[..., i:].contiguous() for i in range(2))
    mask = torch.ones(rows, 1, 1, room, dtype=torch.bool)
    mask[0, ..., :5], mask[1, ..., 30:], mask[2, ..., 3:20:2], mask[3, ..., 1:] = False, False, False, False
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask, scale=0.3, enable_gqa=True
    )
    agree(cpu_operations.attend(q, k, v, mask, 0.3), exact.transpose(1, 2))


ROWS = [  # tokens of the second side, from s on, do not see the first, from c to there: c, s, length
    (130, 200, 260), (3, 7, 90), (64, 128, 200), (1, 1, 1), (100, 100, 100), (0, 5, 9), (300, 301, 303), (5, 150, 151),
]  # fmt: skip


def row_by_row(q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[int, ...]], scale: float) -> Tensor:
    """The formula, with each row's own mask."""
    outputs, heads, start = [], q.shape[1] // k.shape[1], 0
    for common, second, length in rows:
        i = torch.arange(length)
        mask = (i[:, None] >= i) & ~((i[:, None] >= second) & (i >= common) & (i < second))
        queries_of_row, keys, values = (x[:, :, start : start + length] for x in (q, k, v))
        keys, values = (x.repeat_interleave(heads, 1) for x in (keys, values))
        scores = (queries_of_row @ keys.mT * scale).masked_fill(~mask, -torch.inf)
        outputs.append(scores.softmax(-1) @ values)
        start += length
    return torch.cat(outputs, 2).transpose(1, 2)


def spans(rows: list[tuple[int, ...]]) -> Tensor:
    table = torch.tensor(rows)
    return torch.cat([(table[:, 2].cumsum(0) - table[:, 2])[:, None], table], 1)


@pytest.mark.parametrize("size", [8, 64, 80])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("beside", [False, True])  # heads beside each other, or beneath
def test_rows_attend_and_learn_each_for_itself(heads: int, groups: int, size: int, beside: bool) -> None:
    needed(torch.bfloat16, cpu_operations.for_rows)
    tokens = sum(length for *_, length in ROWS)
    qkv = []
    for i, n in enumerate((heads, groups, groups)):
        x = drawn(1, tokens, n, size, dtype=torch.bfloat16).roll(i, 1).transpose(1, 2)
        qkv.append((x if beside else x.contiguous()).requires_grad_())
    exact = [x.detach().double().requires_grad_() for x in qkv]
    output, expected = cpu_operations.attend_rows(*qkv, spans(ROWS), 0.2), row_by_row(*exact, ROWS, 0.2)  # type: ignore[arg-type,call-arg]
    outer = drawn(1, tokens, heads, size, dtype=torch.bfloat16)
    gradients = torch.autograd.grad(output, qkv, outer)
    wanted = torch.autograd.grad(expected, exact, outer.double())
    for got, want in zip((output, *gradients), (expected, *wanted), strict=True):
        assert got.shape == want.shape
        # Scores' weights, their product and the result are rounded, each by 2^-9 / sqrt(3) rms: 0.002 of the norm,
        # twice that where a gradient passes through as many again. One number is off by more where terms cancel.
        assert float((got.double() - want).norm() / want.norm()) < 0.004
        torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    needed(torch.bfloat16, cpu_operations.for_rows)
    lengths, results = (65, 63, 64, 2), []
    row_spans = spans([(n, n, n) for n in lengths])
    for bad in (False, True):
        qkv = [drawn(1, sum(lengths), 1, 8, dtype=torch.bfloat16).roll(i, 1).transpose(1, 2) for i in range(3)]
        if bad:
            for x in qkv:
                x[:, :, :65] = torch.nan
        qkv = [x.requires_grad_() for x in qkv]
        out = cpu_operations.attend_rows(*qkv, row_spans, 0.2)  # type: ignore[call-arg]
        gradients = torch.autograd.grad(out, qkv, torch.ones_like(out))
        results.append([out[0, 65:], *(x[0, 0, 65:] for x in gradients)])
    for clean, beside in zip(*results, strict=True):
        assert torch.equal(clean, beside)


def test_rows_beyond_the_tokens_are_refused() -> None:
    needed(torch.bfloat16, cpu_operations.for_rows)
    qkv = [drawn(1, 2, 10, 8, dtype=torch.bfloat16) for _ in range(3)]
    for row in ([0, 11, 11, 11], [5, 6, 6, 6], [-1, 4, 4, 4], [0, 5, 4, 6], [0, 4, 7, 6]):
        with pytest.raises(ValueError, match="attend_rows: row 0 of"):
            cpu_operations.attend_rows(*qkv, torch.tensor([row]), 0.2)  # type: ignore[call-arg]


@torch._inductor.config.patch(emulate_precision_casts=False)
@pytest.mark.parametrize("compiler", ["traced", pytest.param("c++", marks=pytest.mark.long)])
def test_a_compiled_model_scores_and_learns_with_them_as_without(
    compiler: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "traced":
        request.getfixturevalue("traced")
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    lm, rows = tiny.causal_lm("llama", std=0.05).bfloat16(), tiny.sequences([12, 40, 17, 31], prompts=[3, 9, 1, 8])
    exact = scores_and_gradient(copy.deepcopy(lm).double(), rows)
    attention.install(lm)
    packing.detect_support(lm, unsharded=True)
    assert packing.packs(lm, 20)
    compiling.compile_layers(lm)
    compiling.round_like_eager()
    errors = []
    attend = cpu_operations.attend_rows if cpu_operations.for_rows(torch.bfloat16) else (
        lambda q, k, v, spans, scale: row_by_row(q, k, v, spans[:, 1:].tolist(), scale)
    )  # fmt: skip
    for usable in (False, True):
        monkeypatch.setattr(cpu_operations, "for_rows", lambda _, usable=usable: usable)
        calls = [0]
        monkeypatch.setattr(cpu_operations, "attend_rows", counted(attend, calls))
        logprobs, gradient = scores_and_gradient(lm, rows)
        assert calls[0] == (lm.config.num_hidden_layers if usable else 0)
        with torch.no_grad():
            assert torch.equal(Policy(lm)(rows).logprobs.double(), logprobs)  # scoring rounds as training does
        errors.append([float((x - y).norm()) for x, y in zip((logprobs, gradient), exact, strict=True)])
    torch._dynamo.reset()
    for one, other in zip(errors[0], errors[-1], strict=True):
        # As many roundings of the same size: over n numbers the ratio of two such norms scatters by n^-1/2, here 0.1.
        assert 0 < one < 1.5 * other and other < 1.5 * one


def scores_and_gradient(lm: PreTrainedModel, rows: Sequences) -> tuple[Tensor, Tensor]:
    """Log-probs of the responses, and their sum's gradient with respect to all weights, in fp64."""
    logprobs = Policy(lm)(rows).logprobs
    gradient = torch.autograd.grad(logprobs.sum(), list(lm.parameters()), allow_unused=True)
    return logprobs.detach().double(), torch.cat([g.flatten() for g in gradient if g is not None]).double()


def counted(function: Callable[..., Tensor], calls: list[int]) -> Callable[..., Tensor]:
    def count(*arguments: object) -> Tensor:
        calls[0] += 1
        return function(*arguments)

    return count


def test_other_numbers_and_odd_sizes_do_not_fit() -> None:
    assert cpu_operations.fits(torch.empty(3, 5), torch.empty(2, 4, dtype=torch.bfloat16))
    assert not cpu_operations.fits(torch.empty(3, 4), torch.empty(2, 5, dtype=torch.bfloat16))
    assert not cpu_operations.fits(torch.empty(3, 4, dtype=torch.float16))
    assert not cpu_operations.for_one_token(torch.float16)
    assert not cpu_operations.for_rows(torch.float32)


def test_where_the_source_does_not_compile_it_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    (tmp_path / "cpp").mkdir()
    for name in cpu_operations.SOURCES:
        (tmp_path / "cpp" / name).write_text("no C++")
    monkeypatch.setattr(cpu_operations, "__file__", str(tmp_path / "cpu_operations.py"))
    cpu_operations.for_one_token.cache_clear(), cpu_operations._compiled.cache_clear()
    try:
        with pytest.warns(UserWarning, match="cpp does not compile, so slower operations of torch are used: .*error: "):
            assert not cpu_operations.for_one_token(torch.float32)
        assert not cpu_operations.for_one_token(torch.bfloat16)
    finally:
        cpu_operations.for_one_token.cache_clear(), cpu_operations._compiled.cache_clear()
