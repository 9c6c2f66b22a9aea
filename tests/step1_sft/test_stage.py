"""The loss of fine-tuning over the last batch of an epoch, which is smaller, on any number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batches import Batches
from data.prepare.encode import Demonstration
from rlhf.models.policy import TokenOutput
from rlhf.types import Sequences
from step1_sft import stage
from step1_sft.config import SFTConfig

ROWS = [Demonstration(tuple(range(1, 4 + n % 7)), ((1 + n % 2, 3 + n % 7),)) for n in range(19)]
"""19 rows of 3 to 9 tokens, of which 1 to 8 are learned"""
EQUAL, UNEQUAL = [1.0] * 19, [n % 4 / 2 + 0.25 for n in range(19)]
"""weights of the rows"""


class Model:
    """A policy for which the log-prob of a token is minus its id; it adds up the losses of a step."""

    module = SimpleNamespace(lm=None)

    def __call__(self, rows: Sequences) -> TokenOutput:
        return TokenOutput(-rows.ids.float() * rows.loss_mask)

    def step(self, micros: Sequence[Sequences], loss: Callable[[Sequences], Any], _: object) -> dict[str, float]:
        assert all(len(micro) <= 3 for micro in micros)
        return {"loss": sum(float(loss(micro)[0]) for micro in micros), "micros": len(micros)}


def steps_of(
    rank: int, ranks: int, weights: list[float], sums: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, float]]:
    config = SFTConfig(model="x", batch_size=8, micro_batch_size=3, num_train_epochs=2)
    batches = Batches(len(ROWS), 8, 5, (rank, ranks), drop_last=False)
    model: Any = Model()
    dataset: Any = [replace(row, weight=weight) for row, weight in zip(ROWS, weights, strict=True)]
    monkeypatch.setattr(stage.collectives, "sum_over_ranks", sums)
    return list(stage.train(model, dataset, batches, config, 0))


@pytest.mark.parametrize("weights", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_row_counts_once_in_the_mean_of_its_step(
    ranks: int, weights: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch of 3 rows: two ranks repeat one row, and one of four has none. A token has its row's weight."""
    shares: list[list[Tensor]] = []
    for rank in range(ranks):
        shares.append([])
        steps_of(rank, ranks, weights, lambda mine: shares[-1].append(mine) or mine, monkeypatch)  # type: ignore[func-returns-value]
    totals = [torch.stack(of_step).sum(0) for of_step in zip(*shares, strict=True)]
    results = []
    for rank in range(ranks):
        waiting = iter(totals)
        results.append(steps_of(rank, ranks, weights, lambda _, waiting=waiting: next(waiting), monkeypatch))  # type: ignore[misc]
    batches = list(Batches(len(ROWS), 8, 5, drop_last=False).until_epoch(2))
    assert [len(batch) for batch in batches] == [8, 8, 3] * 2
    for batch, of_ranks in zip(batches, zip(*results, strict=True), strict=True):
        learned = [(i, weights[row]) for row in batch for span in ROWS[row].spans for i in ROWS[row].ids[slice(*span)]]
        mean = sum(i * weight for i, weight in learned) / sum(weight for _, weight in learned)
        assert sum(each["loss"] for each in of_ranks) == pytest.approx(mean, rel=1e-5)
        assert {each["tokens_learned"] for each in of_ranks} == {len(learned)}
        assert {each["tokens"] for each in of_ranks} == {sum(len(ROWS[row].ids) for row in batch)}
        assert len({each["micros"] for each in of_ranks}) == 1, "a rank would wait for ever"
