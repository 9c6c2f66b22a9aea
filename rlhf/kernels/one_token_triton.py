"""Attention of one new token per row on a GPU: it reads the keys and values that the token sees, and no others.

Decoding is bound by memory. Products over the whole cache read its unused end and its padding too, and write scores
between two kernels. Here one program has the queries that share a key head, loads each key and value once, and keeps
its sums in registers (online softmax: Milakov and Gimelshein, arXiv 1805.02867). Few rows do not fill a GPU, so the
keys of a row are split among programs, and a second kernel joins their sums (Flash-Decoding: Dao et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024
"""programs that fill a GPU: some 8 for each of the 132 multiprocessors of an H100"""
SPLITS, LEAST_KEYS = 32, 128
"""splits of a row at most, and keys of the cache for each at least: a program of fewer keys costs more than it saves"""
TILE = 4096
"""elements of a tile of keys: 8 kB in bf16, so that two tiles in flight of keys and of values stay below 48 kB"""
REGISTERS = 96
"""of a thread: 5 programs of 4 warps on a multiprocessor; without the limit ptxas takes 106 for some shapes"""
SCAN = 2048
"""keys whose visibility is read at once: 16 bytes for each of 128 threads"""
FEWEST_ROWS = 16
"""rows of the smallest product of a tensor core; queries are padded to it"""


@triton.jit
def attend_split(
    Q, K, V, Visible, Out, Sums, Largest, Weights, length, scale, cap,
    q_row, q_head, k_row, k_head, k_token, v_row, v_head, v_token, visible_row,
    masked: tl.constexpr, capped: tl.constexpr, group: tl.constexpr, tile: tl.constexpr, splits: tl.constexpr,
    block: tl.constexpr, scan: tl.constexpr, d_k: tl.constexpr, d_v: tl.constexpr, wide_k: tl.constexpr,
    wide_v: tl.constexpr,
):  # fmt: skip
    """One program for each (row, key head, split). With one split it writes `Out`, else its sums.

    Out [rows, heads, d_v]; Sums [rows, heads, splits, d_v], Largest and Weights [rows, heads, splits] fp32
    """
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(1) * group
    member, column_k, column_v = tl.arange(0, tile), tl.arange(0, wide_k), tl.arange(0, wide_v)
    head = key_head * group + member
    own = (member < group)[:, None]
    q = tl.load(Q + row * q_row + head[:, None] * q_head + column_k, mask=own & (column_k < d_k), other=0.0)

    first, last = 0, length  # the first key that the token sees, and the one after the last
    if masked:
        first, last = length, 0
        for start in range(0, length, scan):
            key = start + tl.arange(0, scan)
            sees = tl.load(Visible + row * visible_row + key, mask=key < length, other=0) != 0
            first = tl.minimum(first, tl.min(tl.where(sees, key, length), 0))
            last = tl.maximum(last, tl.max(tl.where(sees, key + 1, 0), 0))
    keys = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), block) * block
    first += split * keys
    last = tl.minimum(last, first + keys)

    largest = tl.full([tile], -float("inf"), tl.float32)
    weight = tl.zeros([tile], tl.float32)
    total = tl.zeros([tile, wide_v], tl.float32)
    k_first, v_first = K + row * k_row + key_head * k_head, V + row * v_row + key_head * v_head
    for start in range(first, last, block):
        key = start + tl.arange(0, block)
        sees = key < last
        if masked:
            sees = tl.load(Visible + row * visible_row + key, mask=sees, other=0) != 0
        k = tl.load(k_first + key[:, None] * k_token + column_k, mask=sees[:, None] & (column_k < d_k), other=0.0)
        v = tl.load(v_first + key[:, None] * v_token + column_v, mask=sees[:, None] & (column_v < d_v), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if capped:
            scores = cap * (2 * tl.sigmoid(2 / cap * scores) - 1)  # cap * tanh(scores / cap)
        scores = tl.where(sees, scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(now == -float("inf"), 0.0, now)  # no key of this split yet
        p, shrink = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        weight = weight * shrink + tl.sum(p, 1)
        largest = now

    index = row * heads + head
    if splits == 1:
        result = (total / weight[:, None]).to(Out.dtype.element_ty)
        tl.store(Out + index[:, None] * d_v + column_v, result, mask=own & (column_v < d_v))
    else:
        index = index * splits + split
        tl.store(Sums + index[:, None] * d_v + column_v, total, mask=own & (column_v < d_v))
        tl.store(Largest + index, largest, mask=member < group)
        tl.store(Weights + index, weight, mask=member < group)


@triton.jit
def join_splits(Sums, Largest, Weights, Out, splits: tl.constexpr, d_v: tl.constexpr, wide_v: tl.constexpr):
    """One program for each (row, head): `Out` from the sums of its splits."""
    index = tl.program_id(0).to(tl.int64)
    split, column = index * splits + tl.arange(0, splits), tl.arange(0, wide_v)
    largest = tl.load(Largest + split)
    share = tl.exp(largest - tl.max(largest, 0))
    sums = tl.load(Sums + split[:, None] * d_v + column, mask=(column < d_v)[None, :], other=0.0)
    result = tl.sum(sums * share[:, None], 0) / tl.sum(tl.load(Weights + split) * share, 0)
    tl.store(Out + index * d_v + column, result.to(Out.dtype.element_ty), mask=column < d_v)


def splits_of(programs: int, length: int) -> int:
    """Into how many parts, a power of 2, the `length` keys of a row are split where `programs` would run unsplit."""
    most = min(SPLITS, triton.cdiv(PROGRAMS, programs), max(1, length // LEAST_KEYS))
    return 1 << (most.bit_length() - 1)


def block_of(width: int) -> int:
    """Keys of a tile whose heads have this width, padded to a power of 2."""
    return min(64, max(FEWEST_ROWS, TILE // width))


def warps_of(width: int) -> int:
    """Warps of a program: with more, wide heads would not fit the registers of 4."""
    return 4 if width <= 128 else 8


@torch.library.custom_op("rlhf::attend_one_token", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    """softmax(scale q k^T) v of one token per row; with a cap c, of c tanh(scale q k^T / c).

    q [B, heads, 1, d], k [B, fewer or as many heads, L, d] and v [B, ..., L, d_v] with any strides but for the last
    dimension, visible bool [B or 1, 1, 1, L or more], None: all -> [B, 1, heads, d_v]
    """
    rows, heads, _, d_k = q.shape
    (key_heads, length), d_v = k.shape[1:3], v.shape[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    splits = splits_of(rows * key_heads, length)
    wide_k, wide_v = (max(FEWEST_ROWS, triton.next_power_of_2(d)) for d in (d_k, d_v))
    wide = max(wide_k, wide_v)
    out = torch.empty(rows, 1, heads, d_v, dtype=v.dtype, device=q.device)
    sums, largest, weights = out, out, out  # not used without splits
    if splits > 1:
        sums = torch.empty(rows, heads, splits, d_v, device=q.device)
        largest, weights = torch.empty(2, rows, heads, splits, device=q.device)
    mask = q if visible is None else visible.view(torch.uint8)
    attend_split[(rows, key_heads, splits)](
        q, k, v, mask, out, sums, largest, weights, length, scale, cap,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        0 if visible is None or len(visible) == 1 else visible.stride(0),
        masked=visible is not None, capped=cap > 0, group=heads // key_heads,
        tile=max(FEWEST_ROWS, triton.next_power_of_2(heads // key_heads)), splits=splits, block=block_of(wide),
        scan=min(SCAN, triton.next_power_of_2(length)), d_k=d_k, d_v=d_v,
        wide_k=wide_k, wide_v=wide_v, num_warps=warps_of(wide), maxnreg=REGISTERS,
    )  # fmt: skip
    if splits > 1:
        join_splits[(rows * heads,)](sums, largest, weights, out, splits=splits, d_v=d_v, wide_v=wide_v)
    return out


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    return v.new_empty(q.shape[0], 1, q.shape[1], v.shape[-1])
