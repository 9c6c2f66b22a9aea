"""What words alone say of the preference of a pair: the baseline of a reward model. Pure functions."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, softplus

Sides = tuple[Sequence[int], Sequence[int]]
"""the ids of the chosen and of the rejected response"""


def preference_gaps(train: Sequence[Sides], held_out: Sequence[Sides], penalty: float = 1.0) -> Tensor:
    """The log-odds that the chosen side of each held-out pair is preferred, float64 [N], by a logistic regression.

        x_v = 1[v in chosen] - 1[v in rejected]        minimise sum_n log(1 + exp(-w . x_n)) + penalty / 2 |w|^2

    over the training pairs; a penalty of 1 is scikit-learn's default. The order of words and their number do not count.
    """
    size = 1 + max((i for pairs in (train, held_out) for pair in pairs for side in pair for i in side), default=0)
    bags, weight = _Bags(train), torch.zeros(size, 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = softplus(-bags.products(weight)).sum() + penalty / 2 * weight.square().sum()
        torch.autograd.backward(value)
        return value

    optimizer.step(objective)
    return _Bags(held_out).products(weight.detach())


class _Bags:
    """x of each pair: the words that one side alone has, with their signs."""

    def __init__(self, pairs: Sequence[Sides]) -> None:
        rows = [
            [(i, 1.0) for i in sorted({*chosen} - {*rejected})] + [(i, -1.0) for i in sorted({*rejected} - {*chosen})]
            for chosen, rejected in pairs
        ]
        entries, sizes = [entry for row in rows for entry in row], [len(row) for row in rows]
        self._words = torch.tensor([i for i, _ in entries], dtype=torch.long)
        self._signs = torch.tensor([sign for _, sign in entries], dtype=torch.float64)
        self._starts = torch.tensor([0, *sizes], dtype=torch.long).cumsum(0)[: len(rows)]

    def products(self, weight: Tensor) -> Tensor:
        """w . x of each pair [N]; weight [V, 1]."""
        return embedding_bag(self._words, weight, self._starts, mode="sum", per_sample_weights=self._signs)[:, 0]
