"""What a step asks of a device, counted on a CPU: operations, and waits of the host."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.distributed import tensor_parallel
from rlhf.engine import adamw
from rlhf.engine.adamw import MasterAdamW
from tests.support import engine_runs, tiny
from tests.support.engine_runs import batches, engine, step

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(50, 20), *[(5, 5)] * 40, (0,)]
"""a matrix, and others which have as many numbers together"""


class Operations(TorchDispatchMode):
    """Counts the operations by name. On a GPU each of them starts a kernel or a few, however long its lists are."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        self.counts[name] += not name.startswith("_record_function")  # a mark for the profiler
        return op(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def gradients(number: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1 + number)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


@pytest.mark.parametrize("stage", engine_runs.ALONE)
def test_deepspeed_does_not_let_the_host_wait_for_its_clock(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ThroughputTimer begins with the third step."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import timer

    calls: list[str] = []
    trained = engine({"zero_stage": stage})
    monkeypatch.setattr(timer, "get_accelerator", lambda: calls.append("asked") or get_accelerator())
    for rows in batches():
        step(trained, rows, 3)
    assert calls == []


def test_a_step_of_adamw_has_few_operations_however_many_weights_there_are() -> None:
    own = weights(torch.bfloat16)
    optimizer = MasterAdamW(own, **OPTIONS)
    optimizer.sum_gradients_in(torch.float32)
    for number in range(2):  # the first makes the state
        for weight, gradient in zip(own, gradients(number), strict=True):
            weight.grad = gradient
        with Operations() as operations:
            optimizer.step()
    expected = ("_foreach_mul_", "_foreach_add_", "_fused_adamw_", "_foreach_copy_")
    assert +operations.counts == dict.fromkeys(expected, 2)  # the matrix, then all others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_updated_together_have_the_bits_of_those_updated_one_by_one(dtype: torch.dtype) -> None:
    together, alone = weights(dtype), weights(dtype)
    one, many = MasterAdamW(together, **OPTIONS), [MasterAdamW([weight], **OPTIONS) for weight in alone]
    for number in range(3):
        for mine, other, gradient in zip(together, alone, gradients(number), strict=True):
            mine.grad, other.grad = gradient.to(dtype, copy=True), gradient.to(dtype, copy=True)
        for optimizer in (one, *many):
            optimizer.scale = 0.3
            optimizer.step()
    for mine, other, optimizer in zip(together, alone, many, strict=True):
        assert torch.equal(mine, other)
        assert one.state[mine].keys() == optimizer.state[other].keys()
        assert all(torch.equal(value, optimizer.state[other][name]) for name, value in one.state[mine].items())


def test_fp32_copies_of_gradients_are_no_larger_than_the_largest_one() -> None:
    """The plan counts one copy of the largest weight."""
    parts = list(adamw.batches([torch.zeros(size) for size in (3, 10, 4, 6, 1, 9, 2)]))
    assert [[part.numel() for part in batch] for batch in parts] == [[3], [10], [4, 6], [1, 9], [2]]
    assert list(adamw.batches([])) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_gradients_on_a_device_has_few_operations(dtype: torch.dtype) -> None:
    on_device = [torch.zeros(shape, dtype=dtype, device="meta") for shape in (*SHAPES, (2**21,))]
    with Operations() as operations:
        square = tensor_parallel._squares(on_device)
    assert square.dtype == torch.float64
    assert operations.counts == dict.fromkeys(("_foreach_norm", "stack", "_to_copy", "pow", "sum"), 1)
