"""The operations of a forward pass."""

from rlhf.plan.sizes import Size


def forward_flops(size: Size, rows: float, tokens: float, predicted: float) -> float:
    """Operations of a forward pass: 2 per weight and token in the layers, 2 S^2 d per layer and row in causal
    attention, and 2 V d per predicted token in the head."""
    inner = size.total - size.outer
    attention = 2 * tokens**2 * size.hidden * size.layers
    return rows * (2 * inner * tokens + attention + 2 * size.vocabulary * size.hidden * predicted)
