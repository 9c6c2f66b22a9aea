"""What an iteration says of itself: numbers worked by hand, padding that changes nothing, ranks that add up."""

import json
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.config import option_names
from rlhf.distributed import collectives
from rlhf.maths import credit as crediting
from rlhf.types import Credit, Message, Metrics, Row, ScoredRollout
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING as sft
from step2_reward.config import RewardConfig
from step2_reward.stage import REWARD_MODELLING as reward
from step3_ppo import stage as ppo_stage
from step3_ppo.algorithms import ppo
from step3_ppo.config import ScoreOptions
from step3_ppo.metrics import credit_metrics, rollout_metrics, shaped_metrics, speed
from tests.support.demo import SMALL

MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
IDS = torch.tensor([[5, 6, 5, 6, 0, 0], [5, 7, 0, 0, 0, 0], [9, 9, 9, 9, 9, 2]])
OLD = torch.tensor([[-1.0, -2.0, -1.5, -0.5, 0, 0], [-3.0, -0.25, 0, 0, 0, 0], [-0.5, -1.0, -1.5, -2.0, -2.5, -0.125]])
REF = torch.tensor([[-1.5, -2.0, -2.0, -1.0, 0, 0], [-2.0, -0.25, 0, 0, 0, 0], [-1.5, -1.0, -1.5, -3.0, -2.5, -1.125]])


def by_hand() -> ScoredRollout:
    """Three responses of 4, 2 and 6 tokens after prompts of 3, 1 and 2; the second was cut."""
    return ScoredRollout(
        prompt_ids=torch.full((3, 3), 4),
        prompt_mask=torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]]).bool(),
        response_ids=IDS,
        mask=MASK,
        sampled_logprobs=torch.where(MASK, OLD + torch.tensor([[0.25], [-0.5], [0.0]]), 0.0),
        ended=torch.tensor([True, False, True]),
        rows=tuple(Row((Message("user", str(i)),)) for i in range(3)),
        logprobs=OLD,
        ref_logprobs=REF,
        values=torch.where(MASK, 0.5, 0.0),
        scores=torch.tensor([1.0, -2.0, 4.0]),
        source_scores=torch.empty(3, 0),
    )


def drawn(seed: int, rows: int, width: int) -> ScoredRollout:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=draw)
    mask = torch.arange(width) < lengths[:, None]

    def some(scale: float, shift: float) -> Tensor:
        return (torch.randn(rows, width, generator=draw) * scale + shift).masked_fill(~mask, 0.0)

    old = some(0.5, -2.0)
    return ScoredRollout(
        prompt_ids=torch.full((rows, 5), 4),
        prompt_mask=torch.arange(5) >= torch.randint(0, 4, (rows, 1), generator=draw),
        response_ids=torch.randint(0, 6, (rows, width), generator=draw),
        mask=mask,
        sampled_logprobs=old + some(1e-3, 0.0),
        ended=torch.rand(rows, generator=draw) > 0.3,
        rows=tuple(Row((Message("user", str(i)),)) for i in range(rows)),
        logprobs=old,
        ref_logprobs=old + some(0.2, -0.1),
        values=some(1.0, 0.3),
        scores=torch.randn(rows, generator=draw) + 3,
        source_scores=torch.empty(rows, 0),
    )


def credited(rollout: ScoredRollout) -> Credit:
    assert rollout.values is not None
    rewards = crediting.kl_rewards(rollout.scores, rollout.logprobs, rollout.ref_logprobs, rollout.mask, 0.1)
    return Credit(*crediting.gae(rewards, rollout.values, rollout.mask, 0.99, 0.95))


def all_metrics(rollout: ScoredRollout, credit: Credit) -> Metrics:
    scores = rollout.scores
    assert scores is not None
    return rollout_metrics(rollout, {"half": scores / 2}) | credit_metrics(rollout, credit)


def test_numbers_worked_by_hand() -> None:
    metrics = rollout_metrics(by_hand()) | shaped_metrics(by_hand().scores, ScoreOptions(score_clip=4.0))
    expected = {
        "score": 1.0,
        "score_std": math.sqrt((0 + 9 + 9) / 3),
        "response_length": 4.0,
        "response_length_std": math.sqrt((0 + 4 + 4) / 3),
        "score_length_correlation": 1.0,  # -2, 1, 4 against 2, 4, 6
        "prompt_length": 2.0,
        "tokens": 18.0,
        "ended": 2 / 3,
        "truncated": 1 / 3,
        "kl": (1.5 - 1.0 + 3.0) / 3,
        # d = 0.5 three times, -1 once, 1 three times: exp(-d) - 1 + d
        "kl_k3": (3 * (math.exp(-0.5) - 0.5) + (math.e - 2) + 3 * math.exp(-1)) / 3,
        "sampling_mismatch": (4 * 0.25 + 2 * 0.5) / 12,
        "shaped_score": 1.0,
        "shaped_score_std": math.sqrt((0 + 9 + 9) / 3),
        "score_at_clip": 1 / 3,
        "repeated_4_grams": 1 / 4,  # 5656; 9999 9999 9992
        "distinct_1": 5 / 12,
        "distinct_2": 5 / 9,  # 56 65 (56); 57; 99 (99 99 99) 92
    }
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_credit_worked_by_hand() -> None:
    advantages = torch.where(MASK, torch.tensor([[3.0], [0.0], [-2.0]]), 0.0)
    returns = torch.where(MASK, torch.tensor([[2.5], [0.5], [-0.5]]), 0.0)
    metrics = credit_metrics(by_hand(), Credit(advantages, returns))
    # 4, 2 and 6 tokens; values are 0.5 everywhere, so the critic explains nothing.
    variance = (4 * 2.5**2 + 2 * 0.5**2 + 6 * 0.5**2) / 12 - (8 / 12) ** 2
    assert metrics["advantage_mean"] == pytest.approx(0.0)
    assert metrics["advantage_std"] == pytest.approx(math.sqrt((4 * 9 + 6 * 4) / 12))
    assert metrics["return_mean"] == pytest.approx(8 / 12)
    assert metrics["return_std"] == pytest.approx(math.sqrt(variance))
    assert metrics["raw_advantage_mean"] == pytest.approx(8 / 12 - 0.5)
    assert metrics["raw_advantage_std"] == pytest.approx(metrics["return_std"])
    assert (metrics["value_mean"], metrics["value_std"]) == (0.5, 0.0)
    assert metrics["explained_variance"] == pytest.approx(0.0)
    # Off by 1/6 in the mean, the critic is worse than the mean return.
    assert metrics["critic_error"] == pytest.approx(1 + (8 / 12 - 0.5) ** 2 / variance)
    assert metrics["advantage_peak"] == pytest.approx(9 / (4 * 9 + 6 * 4))


def test_a_critic_that_knows_every_return_explains_all() -> None:
    rollout = drawn(1, 9, 7)
    returns = credited(rollout).returns
    perfect = credit_metrics(replace(rollout, values=returns), Credit(returns, returns))
    assert perfect["explained_variance"] == 1.0 and perfect["raw_advantage_std"] == 0.0
    opposite = credit_metrics(replace(rollout, values=-returns), Credit(returns, returns))
    assert opposite["explained_variance"] == pytest.approx(-3.0)  # var(2 R) / var(R) = 4


def test_without_a_critic_nothing_is_said_of_one() -> None:
    rollout = drawn(1, 9, 7)
    metrics = credit_metrics(replace(rollout, values=None), credited(rollout))
    assert set(metrics) == {"advantage_mean", "advantage_std", "advantage_peak", "return_mean", "return_std"}


@pytest.mark.parametrize("seed", range(4))
def test_against_plain_python(seed: int) -> None:
    rollout = drawn(seed, 23, 12)
    metrics = rollout_metrics(rollout, {"half": rollout.scores / 2})
    responses, lengths = rollout.response_tokens(), rollout.lengths.double()

    def grams(ids: list[int], n: int) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]

    for n in (1, 2):
        everything = [gram for ids in responses for gram in grams(ids, n)]
        assert metrics[f"distinct_{n}"] == pytest.approx(len(set(everything)) / len(everything))
    fours = [grams(ids, 4) for ids in responses]
    repeats = sum(len(each) - len(set(each)) for each in fours)
    assert metrics["repeated_4_grams"] == pytest.approx(repeats / sum(map(len, fours)))
    correlation = torch.corrcoef(torch.stack([rollout.scores.double(), lengths]))[0, 1].item()
    assert metrics["score_length_correlation"] == pytest.approx(correlation)
    assert metrics["score_std"] == pytest.approx(rollout.scores.double().std(correction=0).item())
    assert metrics["score_half"] == pytest.approx(metrics["score"] / 2)
    assert metrics["score_half_std"] == pytest.approx(metrics["score_std"] / 2)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, -1e30])
def test_padding_changes_no_number(garbage: float) -> None:
    rollout = drawn(3, 11, 8)
    credit = credited(rollout)

    def wider(x: Tensor | None, value: float) -> Any:
        assert x is not None
        mask = nn.functional.pad(rollout.mask, (0, 5))
        return nn.functional.pad(x, (0, 5)).masked_fill(~mask, value)

    floats = ("sampled_logprobs", "logprobs", "ref_logprobs", "values")
    padded = replace(
        rollout,
        prompt_ids=nn.functional.pad(rollout.prompt_ids, (3, 0), value=2),
        prompt_mask=nn.functional.pad(rollout.prompt_mask, (3, 0)),
        response_ids=wider(rollout.response_ids, 2),
        mask=wider(rollout.mask, 0),
        **{name: wider(getattr(rollout, name), garbage) for name in floats},
    )
    padded_credit = Credit(wider(credit.advantages, garbage), wider(credit.returns, garbage))
    assert all_metrics(padded, padded_credit) == pytest.approx(all_metrics(rollout, credit), rel=1e-12, abs=1e-12)


def on_two_ranks(work: Callable[[int], Metrics], monkeypatch: pytest.MonkeyPatch) -> list[Metrics]:
    """`work(rank)` on two threads that meet in every sum and gathering."""
    meet = threading.Barrier(2, timeout=90)
    brought: list[Any] = [None, None]
    here = threading.local()

    def gather(value: Any) -> list[Any]:
        brought[here.rank] = value
        meet.wait()
        values = list(brought)
        meet.wait()
        return values

    def rank(number: int) -> Metrics:
        here.rank = number
        return work(number)

    monkeypatch.setattr(collectives, "gather_objects", gather)
    monkeypatch.setattr(
        collectives, "max_over_ranks", lambda numbers: list(map(max, zip(*gather(numbers), strict=True)))
    )
    monkeypatch.setattr(collectives, "sum_over_ranks", lambda tensor: sum(part.double() for part in gather(tensor)))
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


def test_two_ranks_say_what_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of unequal size and width: a mean of means, or of standard deviations, would differ."""
    rollout = drawn(4, 12, 9)
    credit = credited(rollout)
    whole = all_metrics(rollout, credit)
    shares = rollout.lengths.argsort().split([8, 4])

    def share(rank: int) -> Metrics:
        part = rollout[shares[rank]].trimmed()
        width = part.mask.shape[1]
        mine = credit[shares[rank]]
        return all_metrics(part, Credit(mine.advantages[:, :width], mine.returns[:, :width]))

    first, second = on_two_ranks(share, monkeypatch)
    assert first == second == pytest.approx(whole, rel=1e-10)


def test_what_does_not_vary_has_no_correlation() -> None:
    rollout = replace(by_hand(), scores=torch.full((3,), 0.1))
    metrics = rollout_metrics(rollout)
    assert metrics["score_std"] == 0.0 and math.isnan(metrics["score_length_correlation"])
    zeros = torch.zeros(3, 6)
    flat = credit_metrics(replace(rollout, values=zeros), Credit(zeros, zeros))
    assert flat["advantage_std"] == 0.0 and math.isnan(flat["explained_variance"])


def test_one_response_of_one_token() -> None:
    one = drawn(5, 1, 1)
    metrics = all_metrics(one, credited(one))
    assert (metrics["response_length"], metrics["repeated_4_grams"], metrics["distinct_2"]) == (1.0, 0.0, 0.0)
    assert metrics["distinct_1"] == 1.0 and metrics["advantage_std"] == 0.0


def test_an_empty_response_counts_as_a_response_without_tokens() -> None:
    rollout = by_hand()
    mask = MASK.clone()
    mask[1] = False
    metrics = all_metrics(replace(rollout, mask=mask), Credit(torch.ones(3, 6), torch.ones(3, 6)))
    assert metrics["response_length"] == pytest.approx(10 / 3) and metrics["advantage_std"] == 0.0
    assert math.isfinite(metrics["kl"]) and math.isfinite(metrics["sampling_mismatch"])


def test_large_scores_keep_their_spread() -> None:
    rollout = replace(by_hand(), scores=torch.tensor([1000.0, 1000.5, 1001.0], dtype=torch.float64))
    assert rollout_metrics(rollout)["score_std"] == pytest.approx(math.sqrt(0.5 / 3), rel=1e-6)


def test_speed_is_of_the_whole_iteration() -> None:
    metrics = speed(1200.0, {"generate": 3.0, "score": 1.0, "update": 2.0})
    assert metrics["tokens_per_second"] == 200.0 and metrics["seconds_iteration"] == 6.0
    assert metrics["seconds_score"] == 1.0


# --- the page


PAGE = Path(__file__).parents[2] / "docs/metrics.md"

ONCE = {"num_train_epochs": 1}
SHORT = {
    "judge": "data.sources.demo:true_score",
    "response_length": 16,
    "total_episodes": 64,
    "eval_samples": 8,
    "ptx_coef": 0.1,
    "ptx_batch_size": 8,
    "use_score_scaling": True,
    "score_clip": 5.0,
}


def test_the_page_has_every_number_that_the_stages_write(tmp_path: Path) -> None:
    common = SMALL | {"output_dir": str(tmp_path)}
    sft.run(SFTConfig(**common, **ONCE, model="demo-llama"))
    reward.run(RewardConfig(**common, **ONCE, model="demo-llama"))
    ppo_stage.run(ppo.Config(**common, **SHORT))
    cells = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    for file in tmp_path.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert {"train", "eval"} <= {row["kind"] for row in rows}
        names = {name for row in rows if row["kind"] != "warning" for name in row} - {"kind", "step", "seconds"}
        # A score by source is on the page as score_NAME.
        unlisted = {name for name in names - listed if not name.removeprefix("eval_").startswith("score_")}
        assert not unlisted, f"{file.parent.name}: {sorted(unlisted)} not in docs/metrics.md"
    rollout = drawn(6, 4, 4)
    written = set(all_metrics(rollout, credited(rollout))) | set(speed(1.0, {"generate": 1.0, "score": 1.0}))
    assert written - {"score_half", "score_half_std"} <= listed


def test_options_of_the_page_are_there() -> None:
    there = {option for config in (SFTConfig, RewardConfig, ppo.Config) for option in option_names(config)}
    assert set(re.findall(r"--([a-z][\w-]+)", PAGE.read_text(encoding="utf-8"))) <= there | {"ppo", "plan"}
