"""Two ranks that share one model (tensor parallel) or the tokens of its rows (sequence parallel) against two that each
have their own; and what is refused before anything is loaded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.models.splitting import SEQUENCE, TENSOR, check_split, replicas
from rlhf.plan.command import bound, plan_stages
from rlhf.plan.devices import PlanOptions
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from step3_ppo.algorithms.ppo import Config as PPOConfig
from step3_ppo.inputs import check as check_ppo
from tests.support import forked_ranks, tiny
from tests.support.engine_runs import apart
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


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        (
            {"tensor_parallel_size": 2, "sequence_parallel_size": 2},
            4,
            "--tensor-parallel-size 2 --sequence-parallel-size 2: expected one of them, the other 1",
        ),
        ({"tensor_parallel_size": 2, "adapter": "lora,r=4"}, 2, "DeepSpeed cannot split adapters"),
        ({"tensor_parallel_size": 2}, 3, "--tensor-parallel-size 2: got 3 processes, expected a multiple of 2"),
        ({"sequence_parallel_size": 4}, 2, "--sequence-parallel-size 4: got 2 processes, expected a multiple of 4"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        replicas(EngineOptions(**options), ranks)


def test_shares() -> None:
    assert replicas(EngineOptions(), 4) == 4
    assert replicas(EngineOptions(tensor_parallel_size=2), 4) == 2
    assert replicas(EngineOptions(sequence_parallel_size=4, adapter="lora"), 4) == 1


@pytest.mark.parametrize(
    ("family", "changes", "options", "message"),
    [
        ("gpt2", {}, {"tensor_parallel_size": 2}, "is a gpt2, expected one of gemma2, gpt_neo"),
        ("llama", {}, {"tensor_parallel_size": 4}, "has num_key_value_heads 2, expected a multiple of 4"),
        ("opt", {}, {"tensor_parallel_size": 3}, "has num_attention_heads 4, expected a multiple of 3"),
        ("bloom", {}, {"sequence_parallel_size": 2}, "is a bloom, expected one of gpt2, gpt_neox"),
        ("gptj", {}, {"sequence_parallel_size": 2}, "is a gptj"),
        ("mistral", {}, {"sequence_parallel_size": 2}, "attends within a window of 8 tokens"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1},
            {"sequence_parallel_size": 2},
            "within a window",
        ),
        ("llama", {}, {"sequence_parallel_size": 4}, "has num_key_value_heads 2"),
    ],
)
def test_models_that_cannot_be_split(
    family: str, changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny.config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        check_split(EngineOptions(**options), str(tmp_path))
    check_split(EngineOptions(), str(tmp_path))


def test_models_that_can_be_split(tmp_path: Path) -> None:
    for family, changes in (("qwen2", {}), ("llama", {}), ("mistral", {"sliding_window": None})):
        tiny.config_of(family, **changes).save_pretrained(tmp_path)
        check_split(EngineOptions(tensor_parallel_size=2), str(tmp_path))
        check_split(EngineOptions(sequence_parallel_size=2), str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel_size": 2}, "--sequence-parallel-size 2: expected 1 in step 3"),
        (
            {"tensor_parallel_size": 2, "reference": {"zero_stage": 3}},
            "reference: --zero-stage 3: got it with --tensor-parallel-size 2, expected 0",
        ),
        ({"tensor_parallel_size": 2, "adapter": "lora"}, "DeepSpeed cannot split adapters"),
    ],
)
def test_what_step_3_refuses(options: dict[str, Any], message: str) -> None:
    demo = "configs/models/demo-llama.yaml"
    config = PPOConfig(actor_model=demo, critic_model=demo, reward=("length",), **options)
    with pytest.raises(UserError, match=re.escape(message)):
        check_ppo(config, ranks=2)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "sequence_parallel_size"])
def test_a_plan_does_not_know_them(name: str) -> None:
    options = SFTConfig(model="opt-125m", **{name: 2})
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} 2: --plan and --zero-stage auto"):
        plan_stages({"sft": (options, bound(FINE_TUNING, options, {}))}, PlanOptions(devices=2, device="H100"), 1)


def test_frozen_models_are_whole_beside_split_ones() -> None:
    split = EngineOptions(zero_stage=3, tensor_parallel_size=2)
    assert FrozenOptions().follow(split).zero_stage == 0
    assert FrozenOptions().follow(split.model_copy(update={"tensor_parallel_size": 1})).zero_stage == 3
