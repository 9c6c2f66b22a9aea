"""rlhf/models/variable_length.py without a GPU: what our kernels' calls mean, against torch's attention row by row."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from rlhf.models import variable_length
from rlhf.models.variable_length import Rows
from tests.support import tiny

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU, SCALE = torch.device("cpu"), 0.3
LENGTHS = torch.tensor([5, 1, 9])
SAME = 64 * torch.finfo(torch.float32).eps
"""products of 8 numbers and sums of at most 9 terms near 1, in two orders"""


def operands(heads: int = 4) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, int(LENGTHS.sum()), 8, generator=draw) for n in (heads, 2, 2)]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """torch's contract of `varlen_attn`, of [N, heads, d]: rows from one end to the next, causal by window (-1, 0)."""
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == 9
    assert window_size == (-1, 0)
    rows = zip(*(x.transpose(0, 1).split(cu_seq_q.diff().tolist(), 1) for x in (query, key, value)), strict=True)
    attended = [scaled_dot_product_attention(*row, is_causal=True, scale=scale, enable_gqa=enable_gqa) for row in rows]
    return torch.cat(attended, 1).transpose(0, 1)


def packed_attention_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Its contract in torch 2.11, where heads share keys without a word."""
    grouped = query.shape[1] != key.shape[1]
    ends, longest = (cu_seq_q, cu_seq_k), (max_q, max_k)
    return packed_attention(
        query, key, value, *ends, *longest, scale=scale, window_size=window_size, enable_gqa=grouped
    )


def close(got: Tensor, expected: Tensor) -> bool:
    return torch.allclose(got, expected, rtol=0, atol=SAME)


@pytest.mark.parametrize("contract", [packed_attention, packed_attention_of_torch_2_11])
@pytest.mark.parametrize("heads", [2, 4])
def test_flash_attention_gets_the_ends_of_the_rows(
    heads: int, contract: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variable_length, "varlen_attn", contract)
    q, k, v = operands(heads)
    got = variable_length.flash(q, k, v, Rows(LENGTHS, None, CPU), SCALE)
    assert close(got, variable_length.reference(q, k, v, LENGTHS, SCALE))


def test_the_contracts_have_arguments_of_this_torch() -> None:
    real = set(inspect.signature(varlen_attn).parameters)
    asked = set(inspect.signature(packed_attention).parameters)
    assert asked - real <= {"enable_gqa"}


def test_flex_attention_sees_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_length, "flex_kernel", lambda: flex_attention)
    q, k, v = operands()
    got = variable_length.flex(q, k, v, Rows(LENGTHS, None, CPU), SCALE)
    assert close(got, variable_length.reference(q, k, v, LENGTHS, SCALE))


def test_flex_attention_separates_the_sides_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 5, 1 and 9 tokens, of which the second side does not see the first: the mask written out."""
    monkeypatch.setattr(variable_length, "flex_kernel", lambda: flex_attention)
    branch = torch.tensor([0, 0, 1, 2, 2, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    row = torch.tensor([0] * 5 + [1] + [2] * 9)
    visible = (row[:, None] == row) & torch.ones(15, 15, dtype=torch.bool).tril()
    visible &= ~((branch[:, None] == 2) & (branch == 1))
    q, k, v = operands()
    got = variable_length.flex(q, k, v, Rows(LENGTHS, branch, CPU), SCALE)
    expected = scaled_dot_product_attention(q, k, v, visible, scale=SCALE, enable_gqa=True).transpose(1, 2)
    assert close(got, expected)


def test_kernels_are_for_gpus_that_pass_the_test() -> None:
    q, k, v = operands()
    assert variable_length.attend(q, k, v, Rows(LENGTHS, None, CPU), SCALE) is None
    assert not variable_length.works(variable_length.flash, CPU, torch.bfloat16, 8)


@pytest.mark.parametrize("joined", [False, True])
def test_a_packed_model_uses_the_kernel(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from a batch to the kernel: the same states as from padded groups of rows."""
    from rlhf.models import packing
    from rlhf.models.cpu import attention
    from rlhf.types import Pairs

    model = tiny.backbone()
    attention.install(model)
    packing.detect_support(model, unsharded=True)
    rows = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
    pairs = Pairs(rows, tiny.sequences([14, 11, 18], prompts=[3, 9, 1], seed=1))
    make = (lambda: packing.pair_inputs(model, pairs.joined())) if joined else (
        lambda: packing.model_inputs(model, rows.ids, rows.mask)
    )  # fmt: skip
    with torch.no_grad():
        expected = model(**make().inputs, use_cache=False)[0]
        calls = []

        def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
            calls.append(rows.plain)
            return variable_length.flex(q, k, v, rows, scale)

        monkeypatch.setattr(variable_length, "flex_kernel", lambda: flex_attention)
        monkeypatch.setattr(variable_length, "attend", attend)
        got = model(**make().inputs, use_cache=False)[0]
    assert calls == [not joined] * 2  # layers
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
