"""The runs of test_every_option.py on two ranks: every number is what the options predict, as in one process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.options import cases, harness
from tests.options.cases import Bundle
from tests.options.comparison import Comparison
from tests.options.harness import Observed
from tests.options.prediction import config_of, require_predicted

ROOT = Path(__file__).parents[2]
BUNDLES = cases.bundles()


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Observed]:
    out = folder / "two.pt"
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*program, "-m", "tests.options.two_ranks", str(folder), str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {str(bundle): Observed(**fields) for bundle, fields in zip(BUNDLES, torch.load(out), strict=True)}


@pytest.mark.parametrize("bundle", BUNDLES, ids=str)
def test_two_ranks_make_what_is_foretold(bundle: Bundle, two: dict[str, Observed], folder: Path) -> None:
    observed = two[str(bundle)]
    assert observed.ranks == 2
    require_predicted(config_of(folder, bundle), Comparison(observed))


def rows_of_steps(observed: Observed) -> list[list[Any]]:
    return [sorted(row for micro in micros for row in micro) for _, micros in observed.batches]


SUPERVISED = [bundle for bundle in BUNDLES if bundle.stage != "step3_ppo" and "batch_tokens" not in bundle.changes]
"""with batch_tokens, ranks may have a row of the next batch, to be even; of step 3 the batches are predicted"""


@pytest.mark.parametrize("bundle", SUPERVISED, ids=str)
def test_two_ranks_learn_from_the_batches_of_one(bundle: Bundle, two: dict[str, Observed], folder: Path) -> None:
    one = harness.run(bundle.stage, config_of(folder, bundle))
    assert rows_of_steps(two[str(bundle)]) == rows_of_steps(one)
