"""Models whose matrices lie in parts on ranks that work alike (DeepSpeed's AutoTP): told, measured, read whole, set."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.distributed import collectives

PART = 2**17
"""squares that are added up in fp32: of 28 million, which an embedding has, the sum is off by 5e-4"""


def settings(size: int) -> dict[str, Any]:
    """DeepSpeed's section for `size` ranks that share a model; nothing where each has its own.

    The head stays whole: log-probs want the logits of the whole vocabulary on every rank.
    """
    return {"tensor_parallel": {"autotp_size": size, "vocab_parallel_lm_head": False}} if size > 1 else {}


def show_plan(model: nn.Module) -> None:
    """AutoTP looks for the plan of which matrices are split in the config of the model it is given."""
    model.config = next(part.config for part in model.children() if hasattr(part, "config"))


def require_even(model: nn.Module) -> None:
    """Of each matrix every rank must have known rows or columns."""
    for name, weight in model.named_parameters():
        layout = _layout(weight)
        if getattr(weight, "tensor_model_parallel", False):
            assert layout is not None and layout["partition_sizes"], f"{name}: DeepSpeed does not say how it is split"
            assert layout["sub_param_sizes"] is None, f"{name}: DeepSpeed splits it in several places"


def joined(weight: Tensor, value: Tensor) -> Tensor:
    """The whole of which this rank has `value`, of the shape of its part of `weight`. Ranks that share it do this
    together."""
    layout = _split(weight)
    if layout is None:
        return value
    from deepspeed.utils import groups

    group, mine, parts = groups.get_tensor_model_parallel_group(), value.detach().contiguous(), []
    for number, size in enumerate(layout["partition_sizes"]):
        shape = list(mine.shape)
        shape[layout["partition_dim"]] = size
        here = torch.distributed.get_rank(group) == number
        parts.append(mine if here else torch.empty(shape, dtype=mine.dtype, device=mine.device))
        torch.distributed.broadcast(parts[-1], group_src=number, group=group)
    return torch.cat(parts, layout["partition_dim"])


def part(weight: Tensor, value: Tensor) -> Tensor:
    """This rank's part of `value`, which has the whole shape of `weight`."""
    layout = _split(weight)
    if layout is None:
        return value
    from deepspeed.utils import groups

    number = torch.distributed.get_rank(groups.get_tensor_model_parallel_group())
    return value.split(layout["partition_sizes"], layout["partition_dim"])[number].contiguous()


def numel(weight: Tensor) -> int:
    """Elements of the whole weight."""
    layout = _split(weight)
    return int(getattr(weight, "ds_numel", weight.numel())) if layout is None else math.prod(layout["logical_shape"])


def gradient_norm(weights: Iterable[Tensor]) -> float:
    """The norm of all gradients together; parts on other ranks count, copies on other ranks do not."""
    own: list[Tensor] = []
    parts: list[Tensor] = []
    for weight in weights:
        if weight.grad is not None:
            (own if _split(weight) is None else parts).append(weight.grad)
    square = _squares(own)
    if parts:
        # Every share of the rows has all parts, and the sum over ranks counts each rank that works alike once.
        square = square + collectives.sum_over_ranks(
            _squares(parts) * collectives.alike() / collectives.data_world_size()
        )
    return math.sqrt(float(square))


def _squares(gradients: list[Tensor]) -> Tensor:
    """The sum of all squares, in fp64."""
    parts = (part for g in gradients for part in g.flatten().split(PART))
    norms = [torch.linalg.vector_norm(part.float()).double() for part in parts]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _split(weight: Tensor) -> dict[str, Any] | None:
    """How a weight is split, None = it is whole."""
    layout = _layout(weight)
    return None if layout is None or layout["partition_dim"] is None else layout


def _layout(weight: Tensor) -> dict[str, Any] | None:
    return getattr(weight, "ds_autotp_universal_checkpoint_meta", None)
