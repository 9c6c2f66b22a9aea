"""Runs of test_every_option.py on two ranks: every number is what the options predict, as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.options import cases, harness
from tests.options.cases import Bundle
from tests.options.harness import Observed
from tests.options.prediction import config_of, require_run
from tests.support import forked_ranks

pytestmark = pytest.mark.ranks

BUNDLES = cases.on_two_ranks()


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Observed]:
    out = folder / "two.pt"
    forked_ranks.run("tests.options.two_ranks", str(folder), str(out))
    return {str(bundle): Observed(**fields) for bundle, fields in zip(BUNDLES, torch.load(out), strict=True)}


@pytest.mark.parametrize("bundle", BUNDLES, ids=str)
def test_two_ranks_make_what_is_foretold(bundle: Bundle, two: dict[str, Observed], folder: Path) -> None:
    observed = two[str(bundle)]
    assert observed.ranks == 2
    require_run(folder, bundle, observed)


def rows_of_steps(observed: Observed) -> list[list[Any]]:
    return [sorted(row for micro in micros for row in micro) for _, micros in observed.batches]


SUPERVISED = [bundle for bundle in BUNDLES if bundle.stage != "step3_ppo" and "batch_tokens" not in bundle.changes]
"""with batch_tokens, ranks may have a row of the next batch, to be even; of step 3 the batches are predicted"""


@pytest.mark.parametrize("bundle", SUPERVISED, ids=str)
def test_two_ranks_learn_from_the_batches_of_one(bundle: Bundle, two: dict[str, Observed], folder: Path) -> None:
    one = harness.run(bundle.stage, config_of(folder, bundle))
    assert rows_of_steps(two[str(bundle)]) == rows_of_steps(one)
