"""Two ranks that share one model (tensor parallel) or the tokens of its rows (sequence parallel) against two that each
have their own; and what is refused before anything is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.models.splitting import SEQUENCE, TENSOR, check_split, replicas
from rlhf.plan.command import plan_stages
from rlhf.plan.devices import PlanOptions
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from tests.support import forked_ranks, tiny
from tests.support.engine_runs import apart
from tests.support.plans import bound
from tests.support.split_ranks import make

pytestmark = pytest.mark.ranks

Made = Callable[[bool], dict[str, Any]]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`results_of(everything)`: what two ranks saw, each asked once."""
    results: dict[bool, dict[str, Any]] = {}

    def call(everything: bool) -> dict[str, Any]:
        if everything not in results:
            folder = tmp_path_factory.mktemp("split")
            make(folder)
            words = [str(folder), *(["all"] if everything else [])]
            forked_ranks.run("tests.support.split_ranks", *words, timeout_s=900)
            results[everything] = torch.load(folder / "seen.pt")
        return results[everything]

    return call


def require_alike(results: dict[str, Any], kind: str, what: str) -> None:
    """Metrics, responses, checkpoints, saved models and averages; ranks that share went on half way from the checkpoint
    of those that do not."""
    expected, split = results["alone"][what.split()[0]], results[kind][what]
    for one, other in zip(expected["metrics"], split["metrics"], strict=True):
        assert other == pytest.approx(one, abs=2e-6)
    if kind == "tensor":
        assert all(torch.equal(one, other) for one, other in zip(expected["tokens"], split["tokens"], strict=True))
    assert all(torch.equal(weight, split["first"][name]) for name, weight in expected["first"].items())
    for one, other in zip(expected["kept"], split["kept"], strict=True):  # what a checkpoint has is whole
        assert apart(one, other) < 2e-6
    assert apart(expected["last"], split["last"]) < 2e-6
    assert apart(expected["averaged"], split["averaged"]) < 2e-6
    assert apart(expected["last"], expected["first"]) > 1e-3  # something was learned
    assert all(copies == split["copies"][0] for copies in split["copies"])  # to the bit
    assert split["unspoilt"]


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_ranks_that_share_train_as_those_that_do_not(kind: str, results_of: Made) -> None:
    require_alike(results_of(False), kind, "llama 3")


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_ranks_that_share_go_on_to_the_bit(kind: str, results_of: Made) -> None:
    whole, gone_on = (results_of(True)[kind][name] for name in ("whole", "gone on"))
    assert whole["metrics"] == gone_on["metrics"]
    for name in ("last", "averaged"):
        assert apart(whole[name], gone_on[name]) == 0


def test_a_scalar_model_of_shared_rows_is_the_same(results_of: Made) -> None:
    results = results_of(False)
    for one, other in zip(results["scores alone"], results["scores sequence"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert results["losses sequence"] == pytest.approx(results["losses alone"], abs=1e-6)
    first, *_, last = (torch.tensor(scores) for scores in results["scores alone"])
    assert (last > first).all()


@pytest.mark.faults
@pytest.mark.parametrize(("kind", "family"), [*(("tensor", f) for f in TENSOR), *(("sequence", f) for f in SEQUENCE)])
def test_every_family_that_is_let_through(kind: str, family: str, results_of: Made) -> None:
    for stage in (0, 1, 2, 3) if family == "llama" else (1,):
        require_alike(results_of(True), kind, f"{family} {stage}")


# --- one process


def test_ranks_that_work_alike_have_one_share_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv(collectives.RANKS_PER_REPLICA, "2")
    shares_of_ranks = []
    for rank in range(6):
        monkeypatch.setenv("RANK", str(rank))
        shares_of_ranks.append((collectives.dp_rank(), collectives.dp_size(), collectives.leads_replica()))
    assert shares_of_ranks == [(rank, 3, first) for rank in range(3) for first in (True, False)]


def test_shares() -> None:
    assert replicas(EngineOptions(), 4) == 4
    assert replicas(EngineOptions(tensor_parallel_size=2), 4) == 2
    assert replicas(EngineOptions(sequence_parallel_size=4, adapter="lora"), 4) == 1


def test_models_that_can_be_split(tmp_path: Path) -> None:
    for family, changes in (("qwen2", {}), ("llama", {}), ("mistral", {"sliding_window": None})):
        tiny.config_of(family, **changes).save_pretrained(tmp_path)
        check_split(EngineOptions(tensor_parallel_size=2), str(tmp_path))
        check_split(EngineOptions(sequence_parallel_size=2), str(tmp_path))


@pytest.mark.parametrize("name", ["tensor_parallel_size", "sequence_parallel_size"])
def test_a_plan_does_not_know_them(name: str) -> None:
    options = SFTConfig(model="opt-125m", **{name: 2})
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} 2: --plan and --zero-stage auto"):
        plan_stages({"sft": (options, bound(FINE_TUNING, options))}, PlanOptions(devices=2, device="H100"), 1)
