"""What words alone say of the preference of a pair: the baseline of a reward model. Pure functions."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

Sides = tuple[Sequence[int], Sequence[int]]
"""the ids of the chosen and of the rejected response"""


def preference_gaps(train: Sequence[Sides], held_out: Sequence[Sides], penalty: float = 1.0) -> Tensor:
    """The log-odds that the chosen side of each held-out pair is preferred, float64 [N], by a logistic regression.

        x_v = 1[v in chosen] - 1[v in rejected]        minimise sum_n log(1 + exp(-w . x_n)) + penalty / 2 |w|^2

    over the training pairs; a penalty of 1 is scikit-learn's default. The order of words and their number do not count.
    """
    size = 1 + max((i for pairs in (train, held_out) for pair in pairs for side in pair for i in side), default=0)
    rows, weight = _matrix(train, size), torch.zeros(size, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = softplus(-torch.sparse.mm(rows, weight[:, None])).sum() + penalty / 2 * weight.square().sum()
        torch.autograd.backward(value)
        return value

    optimizer.step(objective)
    return torch.sparse.mm(_matrix(held_out, size), weight.detach()[:, None])[:, 0]


def _matrix(pairs: Sequence[Sides], size: int) -> Tensor:
    """x of each pair, sparse [N, V]."""
    entries = [
        (row, i, sign)
        for row, (chosen, rejected) in enumerate(pairs)
        for sign, words in ((1.0, {*chosen} - {*rejected}), (-1.0, {*rejected} - {*chosen}))
        for i in sorted(words)
    ]
    index = torch.tensor([entry[:2] for entry in entries], dtype=torch.long).reshape(-1, 2).T
    values = torch.tensor([sign for *_, sign in entries], dtype=torch.float64)
    return torch.sparse_coo_tensor(index, values, (len(pairs), size), check_invariants=False).coalesce()
