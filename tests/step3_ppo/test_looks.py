"""Looks at the held-out prompts between iterations, and the samples they leave."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.maths.intervals import mean_interval
from rlhf.text.rendering import last_question
from rlhf.types import Samples, ScoredRollout
from step3_ppo import heldout, stage
from step3_ppo.heldout import (
    Evaluation,
    at_start,
    compare,
    gather_evaluation,
    nonfinite_scores,
    show_samples,
    write_rollout,
    write_samples,
)
from tests.support import tiny
from tests.support.players import ONE_STEP, PROMPTS, on_stage, players, prompts_to_train_on


def evaluation_of(scores: list[float], judged: list[float] | None, words: str) -> Evaluation:
    count = len(scores)
    return Evaluation(
        prompts=tuple(f"p{i}" for i in range(count)),
        responses=tuple(f"{words} {i}" for i in range(count)),
        tokens=tuple([i] for i in range(count)),
        scores=torch.tensor(scores),
        judge_scores=None if judged is None else torch.tensor(judged),
        kl=torch.tensor([0.5] * count),
        ref_nll=torch.tensor([2.0] * count),
        lengths=torch.tensor([4.0] * count),
        ended=torch.ones(count),
        distinct_2=0.5,
        questions=tuple(f"q{i}" for i in range(count)),
    )


def test_a_look_has_the_responses_of_all_ranks_in_the_order_of_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts 0 to 4 are dealt out to two ranks: 0, 2, 4 and 1, 3."""
    tokenizer = tiny.tokenizer()
    whole = scored([5, 6, 7, 8, 9])

    def of_rank(rank: int) -> list[Any]:
        alone: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(heldout.collectives, "gather_replicas", lambda mine: alone.append(mine) or [mine])
            gather_evaluation(whole[torch.arange(rank, 5, 2)], judge, tokenizer, {})
        return alone

    def judge(samples: Samples) -> torch.Tensor:
        return torch.tensor([float(text.removeprefix("w")) for text in samples.responses])

    other = iter(of_rank(1))
    monkeypatch.setattr(heldout.collectives, "gather_replicas", lambda mine: [mine, next(other)])
    gathered = gather_evaluation(whole[torch.arange(0, 5, 2)], judge, tokenizer, {})
    monkeypatch.undo()
    alone = gather_evaluation(whole, judge, tokenizer, {})
    assert gathered.prompts == alone.prompts and gathered.questions == alone.questions
    assert gathered.responses == alone.responses == ("w5", "w6", "w7", "w8", "w9")
    for name in ("scores", "judge_scores", "kl", "ref_nll", "lengths", "ended"):
        assert torch.equal(getattr(gathered, name), getattr(alone, name)), name
    assert gathered.scores.tolist() == [50.0, 60.0, 70.0, 80.0, 90.0] and gathered.distinct_2 == alone.distinct_2


def test_the_table_shows_what_users_say_and_no_template(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = gather_evaluation(scored([5, 6, 7]), None, tiny.tokenizer(), {})
    assert evaluation.prompts[0].startswith("<s>") and last_question([]) == ""
    show_samples(evaluation, evaluation, 2)
    printed = capsys.readouterr().out
    assert [question in printed for question in evaluation.questions] == [True, True, False]
    assert "<s>" not in printed


def scored(words: list[int]) -> ScoredRollout:
    """A response of one word to each of as many prompts."""
    prompts, count = tiny.prompts([3] * len(words)), len(words)
    ids, mask = torch.tensor([[word, tiny.EOS] for word in words]), torch.ones(count, 2, dtype=torch.bool)
    logprobs = -torch.arange(2.0 * count).view(count, 2)
    return ScoredRollout(
        prompts.ids, prompts.mask, ids, mask, logprobs, mask[:, 0], prompts.rows,
        logprobs, 2 * logprobs, 10.0 * ids[:, 0], 10.0 * ids[:, :1],
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"rescore": False, **ONE_STEP}], ids=["", "no rescore"])
def test_the_kl_before_training_is_0_in_bf16(changes: dict[str, Any]) -> None:
    """The policy has the weights of the reference. Its log-probs at sampling, of other matrix products, differ."""
    with tiny.one_rank():
        game = players("rloo", dtype="bf16", response_length=40, **changes)
        before = stage.evaluate(on_stage(game), prompts_to_train_on(), None)  # type: ignore[arg-type]
        sampled = game.score(game.sample(PROMPTS))
    assert len(before.kl) == 8 and before.kl.tolist() == [0.0] * 8
    assert ((sampled.sampled_logprobs - sampled.ref_logprobs).abs() > 0).any()
    moved = replace(before, kl=torch.full((8,), 0.5))
    assert compare(before, moved)["eval_kl_floor"] == 0.0


def test_several_sources_each_have_their_number() -> None:
    one = evaluation_of([1.0, 2.0], None, "a")
    before, after = (replace(one, by_source={"mine": torch.tensor(x)}) for x in ([0.0, 1.0], [3.0, 4.0]))
    metrics = compare(before, after)
    assert (metrics["eval_score_mine_before"], metrics["eval_score_mine"]) == (0.5, 3.5)


def test_samples_are_appended_side_by_side(tmp_path: Path) -> None:
    before, after = evaluation_of([1.0, 2.0], [0.0, 0.5], "old"), evaluation_of([3.0, 4.0], [1.0, 1.5], "né\u2028w")
    for iteration in (5, 10):
        write_samples(tmp_path / "samples.jsonl", iteration, before, after)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert [row["iteration"] for row in rows] == [5, 5, 10, 10]
    write_samples(tmp_path / "unjudged.jsonl", 1, replace(before, judge_scores=None), after)
    assert "judge" not in (tmp_path / "unjudged.jsonl").read_text(encoding="utf-8")
    assert rows[1] == {
        "iteration": 5, "prompt": "p1", "question": "q1", "before": "old 1", "after": "né\u2028w 1",
        "score_before": 2.0, "score": 4.0, "kl": 0.5, "judge_before": 0.5, "judge": 1.5, "tokens": [1],
    }  # fmt: skip


def test_samples_with_a_score_that_is_no_number_are_json(tmp_path: Path) -> None:
    before, after = evaluation_of([1.0], None, "old"), evaluation_of([float("nan")], None, "new")
    [row] = write_samples(tmp_path / "samples.jsonl", 5, before, after)
    text = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == row | {"tokens": [0]}
    assert (row["score_before"], row["score"]) == (1.0, None)


def test_the_final_numbers_by_hand() -> None:
    """s = 1.29099 of 1, 2, 3, 4, and t of three degrees of freedom is 3.18245."""
    half = pytest.approx(3.18245 * 1.29099 / 2, rel=0.01)
    before = evaluation_of([1.0, 1.0, 1.0, 2.0], [0.5, 1.0, 0.0, 2.0], "a")
    after = replace(
        evaluation_of([1.0, 2.0, 3.0, 4.0], [1.5, 3.0, 3.0, 6.0], "b"),
        kl=torch.tensor([4.0, 1.0, 2.0, 3.0]),
        ref_nll=torch.tensor([1.0, 2.0, 3.0, 6.0]),
        lengths=torch.tensor([2.0, 2.0, 2.0, 10.0]),
        ended=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        distinct_2=0.25,
    )
    numbers = {
        "eval_score_before": 1.25, "eval_score": 2.5, "eval_score_ci95": half, "eval_kl": 2.5, "eval_kl_ci95": half,
        "eval_kl_floor": 0.5, "eval_response_length": 4.0, "eval_ended": 0.75, "eval_ref_nll_before": 0.5,
        "eval_ref_nll": 0.75, "eval_distinct_2_before": 0.5, "eval_distinct_2": 0.25,
        "eval_changed": 1.0,
    }  # fmt: skip
    gain = pytest.approx(3.18245 * 1.29099 / 2, rel=0.01)  # of 1, 2, 3, 4
    judged = {"eval_judge_before": 0.875, "eval_judge": 3.375, "eval_judge_gain_ci95": gain}
    metrics = compare(before, after)
    assert metrics.pop("eval_judge_ci95") == pytest.approx(3.18245 * 1.887459 / 2, rel=0.01)
    assert metrics == {**numbers, **judged}
    for unjudged in ((replace(before, judge_scores=None), after), (before, replace(after, judge_scores=None))):
        assert compare(*unjudged) == numbers
    start = at_start(after)
    assert start.pop("eval_kl_floor") == start["eval_kl"] and start.pop("eval_judge_gain_ci95") == 0.0
    assert start.pop("eval_judge_ci95") > 0 and start.pop("eval_changed") == 0.0
    assert start == {n: v for n, v in {**numbers, **judged}.items() if n in start} and len(start) == 9
    far = 1000 + torch.rand(999, generator=torch.Generator().manual_seed(0))  # a mean in fp32 is off by some 1e-5
    exact = mean_interval(far)
    assert heldout._ci95(far) == pytest.approx((exact.high - exact.low) / 2, rel=1e-9)
    one = evaluation_of([1.0], None, "a")
    assert math.isnan(compare(one, one)["eval_score_ci95"])


def test_two_of_three_responses_as_before_are_a_third_changed() -> None:
    before = replace(evaluation_of([1.0, 2.0, 3.0], None, "a"), responses=("a", "b", "c"))
    assert compare(before, replace(before, responses=("a", "b", "d")))["eval_changed"] == pytest.approx(1 / 3)
    assert compare(before, before)["eval_changed"] == 0.0


def test_the_first_number_that_is_not_finite_is_named() -> None:
    good = replace(evaluation_of([1.0, 2.0, 3.0], None, "a"), prompts=("p0", "p" * 99 + "\n", "p2"))
    bad = torch.tensor([1.0, math.nan, math.inf])
    assert nonfinite_scores(good) is None and nonfinite_scores(replace(good, judge_scores=good.scores)) is None
    words = f"is not a finite number for 2 of 3 held-out responses, the first to prompt {'p' * 59 + chr(10)!r};"
    for name, evaluation in {
        "score": replace(good, scores=bad),
        "judge": replace(good, judge_scores=bad),
        "mine": replace(good, by_source={"other": good.scores, "mine": bad}),
    }.items():
        message = nonfinite_scores(evaluation)
        assert message is not None and message.startswith(f"{name} {words}")


def test_each_of_several_sources_is_in_a_look() -> None:
    rollout = scored([5, 6])
    scores = {"one": torch.tensor([1.0, 2.0]), "other": torch.tensor([3.0, 4.0])}
    by_source = gather_evaluation(rollout, None, tiny.tokenizer(), scores).by_source
    assert {name: values.tolist() for name, values in by_source.items()} == {"one": [1.0, 2.0], "other": [3.0, 4.0]}
    assert gather_evaluation(rollout, None, tiny.tokenizer(), {"one": scores["one"]}).by_source == {}


def test_a_rollout_is_written_as_it_was(tmp_path: Path) -> None:
    rollout = ScoredRollout(
        prompt_ids=torch.zeros(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        response_ids=torch.tensor([[5, 6], [7, 0]]),
        mask=torch.tensor([[True, True], [True, False]]),
        sampled_logprobs=torch.zeros(2, 2),
        ended=torch.tensor([False, True]),
        rows=(),
        logprobs=torch.tensor([[-1.0, -2.0], [-0.5, 0.0]]),
        ref_logprobs=torch.tensor([[-1.5, -2.0], [-1.0, 0.0]]),
        scores=torch.tensor([1.5, -2.0]),
        source_scores=torch.tensor([[2.0, -5.0], [-1.0, -10.0]]),
    )
    samples = Samples(("p", "q"), ("a b", "c"), rollout, ())
    write_rollout(tmp_path / "rollouts-0.jsonl", 3, rollout, ("learned", "length"), samples)
    rows = [json.loads(line) for line in (tmp_path / "rollouts-0.jsonl").read_text().splitlines()]
    common = {"iteration": 3, "kl": 0.5}
    first = {
        "prompt": "p",
        "response": "a b",
        "score": 1.5,
        "tokens": 2,
        "ended": False,
        "learned": 2.0,
        "length": -5.0,
    }
    other = {
        "prompt": "q",
        "response": "c",
        "score": -2.0,
        "tokens": 1,
        "ended": True,
        "learned": -1.0,
        "length": -10.0,
    }
    assert rows == [common | first, common | other]
