"""Held-out perplexity: how many rows a pass has changes rounding only."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlhf.engine.training import Engine
from rlhf.models.policy import Policy
from rlhf.supervised.demonstrations import perplexity
from step1_sft.config import SFTConfig
from tests.support import players, tiny
from tests.support.device_runs import Rows


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def test_eval_batch_size_rows_make_a_pass() -> None:
    policy, rows = Policy(players.language_model()), Rows(players.demonstrations(16))
    engine, sizes = Engine(policy, SFTConfig(dtype="fp32"), 2), list[int]()
    policy.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    results = {}
    for rows_at_once in (None, 16, 5, 1):
        config: Any = SFTConfig(micro_batch_size=8, eval_batch_size=rows_at_once)
        results[rows_at_once] = perplexity(engine, rows, config.eval_rows, tiny.PAD)  # type: ignore[arg-type]
    assert sizes == [8, 8, 16, 5, 5, 5, 1, *[1] * 16]
    assert list(results.values()) == pytest.approx([results[1]] * 4, rel=100 * torch.finfo(torch.float32).eps)
