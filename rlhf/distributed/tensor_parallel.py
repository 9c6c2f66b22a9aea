"""Models whose matrices are split over the ranks with the same rows (tensor parallelism by DeepSpeed's AutoTP)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config import Tree
from rlhf.distributed import collectives

CHUNK = 2**17
"""squares that a CPU sums in fp32; for 28 million, the size of an embedding, the error would be 5e-4"""


def autotp_settings(size: int) -> Tree:
    """DeepSpeed's section for `size` ranks that share a model; empty for 1.

    The head is not split: log-probs need the logits of the whole vocabulary on every rank.
    """
    return {"tensor_parallel": {"autotp_size": size, "vocab_parallel_lm_head": False}} if size > 1 else {}


def set_autotp_config(model: nn.Module) -> None:
    """Set `model.config`, in which AutoTP looks for the plan of which matrices to split."""
    config: Any = next(part.config for part in model.modules() if isinstance(part, PreTrainedModel))
    model.config = config


def require_known_split(model: nn.Module) -> None:
    """Fail unless DeepSpeed states for each split matrix which rows or columns each rank has."""
    for name, weight in model.named_parameters():
        layout = _layout(weight)
        if getattr(weight, "tensor_model_parallel", False):
            assert layout is not None and layout["partition_sizes"], f"{name}: DeepSpeed does not say how it is split"
            assert layout["sub_param_sizes"] is None, f"{name}: DeepSpeed splits it in several places"


def gather_full(weight: Tensor, value: Tensor) -> Tensor:
    """Gather the full tensor of which this rank has `value`, of the shape of its part of `weight`. All ranks that share
    the weight must call it."""
    layout = _split(weight)
    if layout is None:
        return value
    from deepspeed.utils import groups

    group, own_value, parts = groups.get_tensor_model_parallel_group(), value.detach().contiguous(), []
    for number, size in enumerate(layout["partition_sizes"]):
        shape = list(own_value.shape)
        shape[layout["partition_dim"]] = size
        is_own = torch.distributed.get_rank(group) == number
        parts.append(own_value if is_own else torch.empty(shape, dtype=own_value.dtype, device=own_value.device))
        torch.distributed.broadcast(parts[-1], group_src=number, group=group)
    return torch.cat(parts, layout["partition_dim"])


def local_part(weight: Tensor, value: Tensor) -> Tensor:
    """This rank's part of `value`, which has the full shape of `weight`."""
    layout = _split(weight)
    if layout is None:
        return value
    from deepspeed.utils import groups

    number = torch.distributed.get_rank(groups.get_tensor_model_parallel_group())
    return value.split(layout["partition_sizes"], layout["partition_dim"])[number].contiguous()


def gradient_norm(weights: Iterable[Tensor]) -> float:
    """The norm of all gradients. Parts on other ranks count, copies on other ranks do not."""
    whole_gradients: list[Tensor] = []
    split_gradients: list[Tensor] = []
    for weight in weights:
        if weight.grad is not None:
            (whole_gradients if _split(weight) is None else split_gradients).append(weight.grad)
    square = _squares(whole_gradients)
    if split_gradients:
        # Every replica has all parts; sum_over_ranks divides by the ranks per replica.
        square = square + collectives.sum_over_ranks(
            _squares(split_gradients) * collectives.ranks_per_replica() / collectives.dp_size()
        )
    return math.sqrt(float(square))


def _squares(gradients: list[Tensor]) -> Tensor:
    """The sum of all squares, in fp64.

    A GPU sums each gradient as a tree of small parts itself, and all gradients in few kernels.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    if gradients[0].is_cpu:
        parts = (part for g in gradients for part in g.flatten().split(CHUNK))
        norms = [torch.linalg.vector_norm(part.float()) for part in parts]
    else:
        norms = list(torch._foreach_norm(gradients, 2, torch.float32))
    return torch.stack(norms).double().square().sum()


def _split(weight: Tensor) -> Tree | None:
    """How a weight is split; None = it is not."""
    layout = _layout(weight)
    return None if layout is None or layout["partition_dim"] is None else layout


def _layout(weight: Tensor) -> Tree | None:
    return getattr(weight, "ds_autotp_universal_checkpoint_meta", None)
