"""The engine against a plain AdamW loop: every ZeRO stage, precision, accumulation and number of ranks."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.config.options import EngineOptions
from rlhf.engine.precision import compute_dtype
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.models.policy import Policy
from rlhf.supervised.runner import batches_for
from tests.rlhf.engine import test_ema
from tests.rlhf.engine.test_ema import require_average
from tests.support import engine_runs, forked_ranks, players, reward_runs, tiny
from tests.support.choice import includes_long, marked_long
from tests.support.engine_ranks import AVERAGED, NAN, RANKED, SCORED
from tests.support.engine_runs import (
    BF16_LOSS,
    BF16_WEIGHT,
    EPS,
    OPTIMIZER,
    RATES,
    ROUNDING,
    apart,
    batches,
    require_left_out,
    run,
    start,
    step,
    weights,
)

alone = pytest.mark.parametrize("stage", engine_runs.ALONE)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def plain_loop(dtype: torch.dtype) -> dict[str, Any]:
    """AdamW on weights in `dtype` (on fp32 copies of narrower ones), whole batches of plain cross-entropy."""
    model, master = start().to(dtype), start().to(torch.promote_types(dtype, torch.float32))
    norms_of = [weight for name, weight in master.named_parameters() if "norm" in name]
    matrices = [weight for name, weight in master.named_parameters() if "norm" not in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms_of, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.9), eps=1e-3)
    nll, norms = [], []
    for rate, rows in zip(RATES, batches(), strict=True):
        logits = model(input_ids=rows.ids, attention_mask=rows.mask.long()).logits[:, :-1].to(master.dtype)
        labels = rows.ids.masked_fill(~rows.loss_mask, -100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        model.zero_grad()
        loss.backward()
        for whole, part in zip(master.parameters(), model.parameters(), strict=True):
            whole.grad = part.grad.to(whole.dtype)
        norms.append(float(torch.nn.utils.clip_grad_norm_(master.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        model.load_state_dict(master.state_dict())
        nll.append(loss.item())
    return {"loss": nll, "grad_norm": norms, "weights": {f"lm.{n}": w for n, w in model.state_dict().items()}}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return plain_loop(torch.float64)


def column(result: dict[str, Any], name: str) -> list[float]:
    return [metrics[name] for metrics in result["metrics"]]


def require_plain(result: dict[str, Any], plain: dict[str, Any]) -> None:
    assert column(result, "loss") == pytest.approx(plain["loss"], rel=8 * EPS)
    assert column(result, "nll") == column(result, "loss")
    assert column(result, "grad_norm") == pytest.approx(plain["grad_norm"], rel=8 * EPS)
    assert column(result, "learning_rate") == pytest.approx(RATES, abs=1e-12)
    assert apart(result["weights"], plain["weights"]) < ROUNDING


def test_the_oracle_clips_and_learns(plain: dict[str, Any]) -> None:
    assert min(plain["grad_norm"]) > 0.5 and apart(plain["weights"], plain_start()) > 0.001


def plain_start() -> dict[str, Tensor]:
    return {f"lm.{name}": weight for name, weight in start().state_dict().items()}


# --- one process


@alone
@pytest.mark.parametrize("size", [8, 3])
def test_fp32_equals_the_plain_loop_however_the_batch_is_cut(stage: int, size: int, plain: dict[str, Any]) -> None:
    require_plain(run({"zero_stage": stage}, size), plain)


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 0, "gradient_checkpointing": True},
        {"zero_stage": 3, "gradient_checkpointing": True},
        {"zero_stage": 1, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True, "offload_param": True},
    ],
)
def test_what_saves_memory_changes_no_number(options: dict[str, Any], plain: dict[str, Any]) -> None:
    require_plain(run(options, 3), plain)


def test_an_adapter_learns_the_same_from_activations_that_are_computed_again() -> None:
    """No weight below it learns, so no gradient comes to the inputs of a layer."""
    plain, again = (
        run({"zero_stage": 0, "gradient_checkpointing": checkpointing}, adapter="lora")
        for checkpointing in (False, True)
    )
    assert column(again, "loss") == pytest.approx(column(plain, "loss"), rel=8 * EPS)
    assert column(again, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=8 * EPS)
    assert apart(again["weights"], plain["weights"]) < ROUNDING


def test_bf16_is_mixed_precision_with_fp32_master_weights() -> None:
    expected = plain_loop(torch.bfloat16)
    results = {stage: run({"zero_stage": stage, "dtype": "bf16"}) for stage in engine_runs.ALONE}
    for stage in engine_runs.ALONE:
        assert column(results[stage], "loss") == pytest.approx(expected["loss"], abs=BF16_LOSS)
        assert apart(results[stage]["weights"], expected["weights"]) <= BF16_WEIGHT
        assert {weight.dtype for weight in results[stage]["weights"].values()} == {torch.bfloat16}
    # ZeRO-3 adds up the norm that clips in another order. That moves a master weight by some 1e-10, so of a million
    # weights less than one lies near enough to the middle of two neighbours in bf16 to be rounded the other way.
    assert column(results[3], "loss") == column(results[0], "loss")
    assert apart(results[3]["weights"], results[0]["weights"]) == 0


@pytest.fixture(scope="module")
def added_up() -> tuple[dict[str, Tensor], float]:
    return engine_runs.added_up()


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (3, False), (1, True), (2, True), (3, True)])
def test_bf16_gradients_of_micro_batches_add_up_in_fp32(stage: int, offload: bool, added_up: Any) -> None:
    require_sum(engine_runs.accumulated({"zero_stage": stage, "offload_optimizer": offload}), *added_up)


def require_sum(sums: dict[str, Tensor], exact: dict[str, Tensor], bound: float) -> None:
    assert set(sums) == set(exact)
    assert engine_runs.norm({name: sums[name] - gradient for name, gradient in exact.items()}) < bound


@alone
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_learning_rate_of_0_leaves_every_bit(stage: int, dtype: str) -> None:
    still = OPTIMIZER.model_copy(update={"learning_rate": 0.0})
    engine = engine_runs.engine({"zero_stage": stage, "dtype": dtype}, still)
    before = weights(engine)
    for rows in batches(2):
        assert all(math.isfinite(value) for value in step(engine, rows).values())
    assert apart(weights(engine), before) == 0


def test_no_clipping_when_it_is_off() -> None:
    free = OPTIMIZER.model_copy(update={"max_grad_norm": 0.0, "weight_decay": 0.0})
    for stage in engine_runs.ALONE:
        # SGD would show the size of a gradient; Adam shows a change of size between two steps.
        first, second = batches(2)
        clipped, unclipped = (engine_runs.engine({"zero_stage": stage}, o) for o in (OPTIMIZER, free))
        norms = [[step(engine, rows)["grad_norm"] for rows in (first, second)] for engine in (clipped, unclipped)]
        assert norms[0][0] == pytest.approx(norms[1][0]) and norms[1][0] > 0.5
        assert apart(weights(clipped), weights(unclipped)) > 1e-5
        if stage == 0:  # ZeRO clips otherwise; as torch.nn.utils.clip_grad_norm_
            scales = [engine._engine.optimizer.scale for engine in (clipped, unclipped)]
            assert scales == pytest.approx([0.5 / (norms[0][1] + 1e-6), 1.0], rel=1e-12)


def test_the_same_run_twice_is_bit_exact() -> None:
    one, again = (run({"zero_stage": 2}, 3) for _ in range(2))
    assert one["metrics"] == again["metrics"] and apart(one["weights"], again["weights"]) == 0


# --- dtypes


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="--dtype fp16: the device is a CPU, expected bf16 or fp32 there"):
        compute_dtype(EngineOptions(dtype="fp16"), torch.device("cpu"))
    with pytest.raises(UserError, match="fp16"):
        Engine(Policy(start()), tiny.training_options(EngineOptions(dtype="fp16"), OPTIMIZER), 1)
    assert compute_dtype(EngineOptions(dtype="fp16"), torch.device("cuda")) == torch.float16


# --- inference between steps


@alone
def test_inference_is_whole_without_gradients_and_leaves_training_as_it_was(stage: int, plain: dict[str, Any]) -> None:
    engine = engine_runs.engine({"zero_stage": stage})
    rows = batches(1)[0]
    with engine.inference() as policy:
        logprobs = policy(rows).logprobs
        assert not policy.training and not logprobs.requires_grad
        assert {name: weight.shape for name, weight in policy.named_parameters()} == {
            name: weight.shape for name, weight in Policy(start()).named_parameters()
        }
    assert torch.allclose(logprobs, Policy(start())(rows)[0], atol=1e-5)
    if stage == 3:  # and outside of inference nothing stays whole
        assert sum(weight.numel() for weight in engine.module.parameters()) == 0
        engine(rows)
        assert sum(weight.numel() for weight in engine.module.parameters()) == 0
    require_plain(run({"zero_stage": stage}, generating=True), plain)


def test_an_error_inside_inference_leaves_an_engine_that_trains(plain: dict[str, Any]) -> None:
    engine = engine_runs.engine({"zero_stage": 3})
    with pytest.raises(KeyError), engine.inference():
        raise KeyError
    nll = [step(engine, rows)["loss"] for rows in batches()]
    assert nll == pytest.approx(plain["loss"], abs=1e-6)


# --- two processes: one run for all


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("two") / "runs.pt"
    names = players.PARITY if includes_long(request) else players.QUICK
    forked_ranks.run("tests.support.engine_ranks", str(out), *names)
    results: dict[str, Any] = torch.load(out)
    return results


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_one(stage: int, two: dict[str, Any], plain: dict[str, Any]) -> None:
    require_plain(two[f"fp32 {stage}"], plain)


def test_two_ranks_in_bf16(two: dict[str, Any]) -> None:
    one = run({"zero_stage": 1, "dtype": "bf16"})
    for stage in (1, 2, 3):
        result = two[f"bf16 {stage}"]
        assert column(result, "loss") == pytest.approx(column(one, "loss"), abs=BF16_LOSS)
        assert apart(result["weights"], one["weights"]) <= BF16_WEIGHT
        assert column(result, "loss") == column(two["bf16 1"], "loss")


@pytest.mark.parametrize("kind", ["1", "2", "3", "1 offloaded"])
def test_bf16_gradients_of_two_ranks_add_up_in_fp32(kind: str, two: dict[str, Any], added_up: Any) -> None:
    require_sum(two[f"accumulated {kind}"], *added_up)


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (3, False), (1, True)])
def test_a_score_head_is_in_fp32(stage: int, offload: bool) -> None:
    require_fp32_scores(engine_runs.scored_in_bf16({"zero_stage": stage, "offload_optimizer": offload}))


@pytest.mark.parametrize("stage", SCORED)
def test_a_score_head_is_in_fp32_on_two_ranks(stage: int, two: dict[str, Any]) -> None:
    require_fp32_scores(two[f"scored {stage}"])


def require_fp32_scores(result: dict[str, Tensor]) -> None:
    """Weight and product: the fp64 product of the same states and the optimizer's weight, to n eps sum |w_i h_i|."""
    states, weight = result["states"].double(), result["weight"].double()[0]
    assert result["states"].dtype == torch.bfloat16
    assert torch.equal(result["first"], engine_runs.SCORE_HEAD) and not torch.equal(result["weight"], result["first"])
    bound = len(weight) * EPS * (states.abs() @ weight.abs())
    exact = states @ weight
    assert ((result["scores"] - exact).abs() <= bound).all()
    assert (exact.to(torch.bfloat16) - exact).abs().max() > 100 * bound.max() < 1 < exact.abs().max() / 10


@pytest.mark.parametrize("kind", ["generating 3", "checkpointing 3"])
def test_ranks_that_generate_unequal_lengths_neither_hang_nor_drift(
    kind: str, two: dict[str, Any], plain: dict[str, Any]
) -> None:
    require_plain(two[kind], plain)
    alone = run({"zero_stage": 1}, generating=True)
    for got, expected in zip(two[kind]["tokens"], alone["tokens"], strict=True):
        assert torch.equal(got, expected)


def test_an_adapter_on_two_ranks(two: dict[str, Any]) -> None:
    one = run({"zero_stage": 1}, adapter="lora")
    for stage in (1, 3):
        assert column(two[f"lora {stage}"], "loss") == pytest.approx(column(one, "loss"), abs=1e-6)
        assert apart(two[f"lora {stage}"]["weights"], one["weights"]) < 1e-5


@pytest.mark.parametrize("kind", [*NAN, "bf16"])
def test_nan_on_one_rank_stops_both_with_equal_weights(kind: int | str, two: dict[str, Any]) -> None:
    (first, second) = two[f"nan {kind}"]["ranks"]
    assert first == second
    suspect = 1 + 2 * batches(2)[1].lengths[1::2].argsort(descending=True, stable=True)[3].item()
    require_left_out(first, str(suspect))


@pytest.mark.parametrize("name", [marked_long(name, players.QUICK) for name in players.PARITY])
def test_step_3_on_two_ranks_is_that_of_one(name: str, two: dict[str, Any], tmp_path: Path) -> None:
    """A gradient, whose norm is clipped to 1, is off by at most ORDERS, and AdamW by learning rate / epsilon = 1 times
    that in each step."""
    one, result = players.two_iterations(name, str(tmp_path)), two["step 3"][name]
    assert len(one["metrics"]) == 2
    limit = tiny.ORDERS * sum(metrics["optimizer_steps"] for metrics in one["metrics"])
    gaps = [
        abs(metrics[key] - x) / max(1.0, abs(x))
        for expected, metrics in zip(one["metrics"], result["metrics"], strict=True)
        for key, x in expected.items()
        if not (math.isnan(x) and math.isnan(metrics[key]))
    ]
    print(f"| {name} | {apart(result['weights'], one['weights']):.1e} | {max(gaps):.1e} | {limit:.1e} |")
    assert all(set(x) == set(y) for x, y in zip(one["metrics"], result["metrics"], strict=True))
    assert apart(result["weights"], one["weights"]) < limit and max(gaps) < limit


@pytest.mark.parametrize("kind", [*AVERAGED, "bf16"])
def test_the_average_of_the_weights_on_two_ranks(kind: int | str, two: dict[str, Any]) -> None:
    result = two[f"averaged {kind}"]
    require_average(result, tolerance=test_ema.IN_BF16 if kind == "bf16" else test_ema.ROUNDING)
    assert 0 < len(result["state"]) <= len(result["trace"][0]) / 2 + 1  # each rank keeps its share
    if kind != "bf16":
        assert apart(result["averaged"], engine_runs.run_averaged({"zero_stage": 1})["averaged"]) < ROUNDING


def test_a_bad_score_on_one_rank_stops_the_iteration_on_both(two: dict[str, Any]) -> None:
    first, second = two["skipped iteration"]["ranks"]
    assert first == second
    metrics, unchanged, learned_afterwards, _ = first
    assert metrics == {"skipped_iteration": 1.0} and unchanged and learned_afterwards


def test_ptx_entropy_selection_and_scaling_on_two_ranks(two: dict[str, Any]) -> None:
    one, result = players.a_step_of_everything(), two["everything"]
    assert result["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
    assert result["scaled"] == pytest.approx(one["scaled"], abs=1e-5)
    assert apart(result["weights"], one["weights"]) < 1e-5


def test_ranked_lists_on_two_ranks(two: dict[str, Any], tmp_path: Path) -> None:
    """Of unequally many pairs: a rank that has one fewer computes one that does not count."""
    config = reward_runs.config_of(tmp_path, **RANKED)
    whole = batches_for(reward_runs.rows_of(config), config, (0, 1))
    assert any(len(rows) % 2 for rows in whole)
    one, result = reward_runs.run(tmp_path, **RANKED | {"micro_batch_size": 9}), two["ranked lists"]
    assert result["before"] == pytest.approx(one["before"], abs=1e-5)
    for step_of_two, step_of_one in zip(result["metrics"], one["metrics"], strict=True):
        computed = {name: step_of_two[name] for name in ("padding", "tokens")}  # with the pair that does not count
        assert step_of_two == pytest.approx(step_of_one | computed, abs=1e-5)
        assert step_of_two["tokens"] >= step_of_one["tokens"]
    assert apart(result["weights"], one["weights"]) < 1e-5
