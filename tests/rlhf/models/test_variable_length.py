"""rlhf/models/variable_length.py without a GPU: what our kernels' calls mean, against torch's attention row by row."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def packed_attention_of_torch_2_11(query: Tensor, key: Tensor, *others: Any, **options: Any) -> Tensor:
    """Its contract in torch 2.11, which has no `enable_gqa`: heads share keys without a word."""
    return packed_attention(query, key, *others, **options, enable_gqa=query.shape[1] != key.shape[1])


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


def test_what_our_kernels_for_rows_are_told_of_two_pairs() -> None:
    """Of 3 and 5 tokens: where each row begins, where its second side stops to see, begins, and ends."""
    spans = Rows(*pairs_of([(1, 1, 1), (2, 2, 1)]), CPU).spans
    assert spans.tolist() == [[0, 1, 2, 3], [3, 2, 4, 5]]
    assert Rows(LENGTHS, None, CPU).spans.tolist() == [[0, 5, 5, 5], [5, 1, 1, 1], [6, 9, 9, 9]]


def pairs_of(sizes: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """(lengths, branch) of rows with this many tokens in common, of branch 1 and of branch 2."""
    branch = [torch.arange(3).repeat_interleave(torch.tensor(size)) for size in sizes]
    return torch.tensor([sum(size) for size in sizes]), torch.cat(branch)


@pytest.mark.parametrize(
    "sizes", [[(5, 4, 6)], [(300, 20, 200), (1, 0, 0), (40, 330, 290), (128, 128, 128), (0, 3, 2)], [(0, 1, 1)] * 70]
)
@pytest.mark.parametrize("joined", [True, False])
def test_the_block_mask_is_that_of_all_pairs_of_tokens(sizes: list[tuple[int, int, int]], joined: bool) -> None:
    """torch's own, from the definition: which blocks are computed, with the mask or without, and the mask itself."""
    lengths, branch = pairs_of(sizes)
    row = torch.arange(len(lengths)).repeat_interleave(lengths)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (row[i] == row[j]) & (j <= i) & ~((branch[i] == 2) & (branch[j] == 1) & joined)

    tokens = len(row)
    mask = Rows(lengths, branch if joined else None, CPU).block_mask
    expected = create_block_mask(visible, None, None, tokens, tokens, device="cpu")
    for name in ("kv", "q", "full_kv", "full_q"):
        counts, wanted = (getattr(x, f"{name}_num_blocks") for x in (mask, expected))
        assert torch.equal(counts, wanted), name
        indices, wanted_indices = (getattr(x, f"{name}_indices") for x in (mask, expected))
        for i, count in enumerate(wanted.flatten().tolist()):
            assert torch.equal(indices[0, 0, i, :count], wanted_indices[0, 0, i, :count]), name
    assert mask.seq_lengths == expected.seq_lengths and mask.BLOCK_SIZE == expected.BLOCK_SIZE
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    zero = torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, i, j), visible(zero, zero, i, j))


def test_no_tensor_of_a_block_mask_has_all_pairs_of_tokens() -> None:
    """Of N tokens in n blocks there are at most N x n numbers; torch's own has N x N."""
    lengths, branch = pairs_of([(300, 200, 524)] * 2)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = op(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
            return result

    with Largest():
        _ = Rows(lengths, branch, CPU).block_mask
    assert largest == 2048 * 2048 // variable_length.BLOCK


def test_the_test_of_a_kernel_is_of_the_models_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it compiles then serves the model: shapes and strides are those that a model's attention gets."""
    asked = []
    monkeypatch.setattr(variable_length, "works", lambda *arguments: asked.append(arguments))
    q, k, v = (torch.empty(1, 300, heads, 16, device="meta").transpose(1, 2) for heads in (6, 3, 3))
    rows = Rows(torch.tensor([100, 200]), None, CPU)
    assert variable_length.attend(q, k, v, rows, SCALE) is None
    assert [(arguments[0], *arguments[3:]) for arguments in asked] == [
        (variable_length.flash, 16, (6, 3)),
        (variable_length.flex, 16, (6, 3)),
    ]


def test_compiling_flex_attention_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And the test has tokens for more than two blocks: of fewer, flex attention compiles another kernel."""
    shapes = []

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
        shapes.append((q.shape, q.stride(), k.shape, rows.block_mask.kv_indices.shape))
        raise RuntimeError

    monkeypatch.setattr(variable_length, "flex", attend)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: x)
    cuda = torch.device("cuda")
    rows = Rows
    monkeypatch.setattr(variable_length, "Rows", lambda lengths, branch, _: rows(lengths, branch, CPU))
    assert not variable_length.works.__wrapped__(attend, cuda, torch.float32, 16, (6, 3))
    tokens = sum(variable_length.PROBE)
    assert shapes == [((1, 6, tokens, 16), (tokens * 96, 16, 96, 1), (1, 3, tokens, 16), (1, 1, 3, 3))]
    assert "compiled" in capsys.readouterr().err


def test_kernels_are_for_gpus_that_pass_the_test() -> None:
    q, k, v = operands()
    assert variable_length.attend(q, k, v, Rows(LENGTHS, None, CPU), SCALE) is None
    assert not variable_length.works(variable_length.flash, CPU, torch.bfloat16, 8)


@pytest.mark.parametrize("joined", [False, True])
def test_a_packed_model_uses_the_kernel(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from a batch to the kernel: the same states as from padded groups of rows."""
    from rlhf.kernels import attention
    from rlhf.models import packing
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
