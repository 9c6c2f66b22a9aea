"""Operations of one new token a row on CPUs, in C++ (kernels.cpp): weights, keys and values are read once, as they lie.

Measured with a model of 135M in bf16 on two cores (Xeon with AMX), 16 rows: the products of a step take 14 ms where
oneDNN takes 17 with weights in an order of its own, a second copy of all of them; attention takes 3 where products
and a compiled softmax take 8.
"""

import functools
import platform
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F


def products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """x [..., K] times each weight [N_i, K], transposed, plus its bias [N_i], beside each other: [..., sum of N_i].

    biases: one a weight, or none. Only where `usable` says so.
    """
    found: Tensor = torch.ops.rlhf.products(x, weights, biases)
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v of one token a row. q [B, heads, 1, d], k and v [B, fewer or as many heads, S, d], seen
    bool [B or 1, 1, 1, S] -> [B, 1, heads, d]. Only where `usable` says so."""
    found: Tensor = torch.ops.rlhf.attend(q, k, v, seen, scale)
    return found


def fits(*operands: Tensor) -> bool:
    """Whether operands of such a dtype and size, of their last dimension, can be multiplied."""
    return all(x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0) for x in operands)


@functools.cache
def usable(dtype: torch.dtype) -> bool:
    """Whether the operations do what they should on this machine. The first call compiles them, which the disk
    remembers."""
    if dtype not in (torch.float32, torch.bfloat16) or not _compiled():
        return False
    draw = torch.Generator().manual_seed(0)
    x, weight, q, k, v = (
        torch.randn(shape, generator=draw).to(dtype)
        for shape in ((3, 1, 40), (50, 40), (2, 6, 1, 40), (2, 2, 21, 40), (2, 2, 21, 40))
    )
    seen = torch.arange(21).expand(2, 1, 1, 21) > 2
    close = functools.partial(torch.allclose, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.1)
    expected = F.scaled_dot_product_attention(q, k, v, seen, scale=0.2, enable_gqa=True).transpose(1, 2)
    try:
        return close(products(x, [weight], []), x @ weight.mT) and close(attend(q, k, v, seen, 0.2), expected)
    except RuntimeError:  # oneDNN has no block products for this CPU
        return False


@functools.cache
def _compiled() -> bool:
    if platform.machine() != "x86_64":
        return False
    from torch._inductor.codecache import CppCodeCache

    source = Path(__file__).with_suffix(".cpp")
    try:
        CppCodeCache.load(source.read_text(encoding="utf-8"), device_type="cpu", needs_vec_isa=True)
    except (RuntimeError, OSError) as error:
        warnings.warn(f"{source.name} does not compile, so tokens are sampled more slowly: {error}", stacklevel=2)
        return False
    torch.library.register_fake("rlhf::products", lambda x, ws, _: x.new_empty(*x.shape[:-1], sum(map(len, ws))))
    torch.library.register_fake("rlhf::attend", lambda q, *_: q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3]))
    return True
