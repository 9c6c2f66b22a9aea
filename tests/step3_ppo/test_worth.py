"""How many samples of the policy before training one response of the tuned policy is worth, as step 3 measures it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import plugins
from rlhf.maths import best_of_n
from step3_ppo import heldout, stage, worth
from step3_ppo.config import BEST_OF
from step3_ppo.heldout import Evaluation
from step3_ppo.learner import Learner
from tests.support import tiny
from tests.support.demo import SMALL
from tests.support.players import count_of_words, on_stage, players, prompts_to_train_on
from tests.support.recorded_runs import evaluation

NOISE = """import random
import numpy as np
import torch
def score(prompts, responses):
    return [random.random() + np.random.rand() + torch.rand(()).item() for _ in responses]
"""
"""a score that is drawn, from every generator that a user may take"""


@pytest.mark.parametrize(
    ("responses", "prompts", "ranks", "size"),
    [
        (640, 85, 1, (32, 0)),  # a tenth is two to a prompt: nothing is said
        (960, 85, 1, (32, 3)),
        (5120, 101, 1, (32, 16)),
        (4096, 200, 48, (48, 8)),
        (40_960, 85, 1, (65, 63)),
        (1_000_000, 200, 8, (200, 255)),
        (4096, 8, 4, (8, 51)),
        (4096, 2, 1, (2, 204)),
        (4096, 1, 1, (1, 0)),  # one prompt has no interval
    ],
)
def test_at_most_a_tenth_of_the_responses(responses: int, prompts: int, ranks: int, size: tuple[int, int]) -> None:
    assert worth.size(responses, prompts, ranks) == size
    assert 10 * size[0] * size[1] <= responses and size[0] >= min(ranks, prompts)


def learner_of(out: Path, **changes: Any) -> Learner:
    (out / "step3_ppo").mkdir(exist_ok=True)
    return on_stage(players("rloo", total_episodes=400, output_dir=str(out), **changes))


def measured(learner: Learner) -> tuple[Evaluation, Tensor]:
    prompts: Any = prompts_to_train_on()
    before = stage.evaluate(learner, prompts, count_of_words)
    start = worth.measure(learner, prompts, count_of_words, before)
    assert start is not None
    return before, start


def test_the_first_response_is_that_of_the_evaluation_and_the_others_are_new(tmp_path: Path) -> None:
    with tiny.one_rank():
        learner = learner_of(tmp_path, missing_eos_penalty=10.0)
        state = torch.get_rng_state()
        before, start = measured(learner)
        assert torch.equal(torch.get_rng_state(), state)
    assert start.shape == (2, 8, 6)  # 40 of 400
    assert 2**19 < worth.AT_START != stage.HELD_OUT, "a random stream that no evaluation and no iteration has"
    assert torch.equal(start[0, :, 0], before.scores) and len(start[0].unique()) > 3
    penalties = start[1] - start[0]  # the judge is the same function, without the penalty
    assert {*penalties.flatten().tolist()} == {0.0, 10.0}


def test_they_are_kept_while_the_policy_and_its_scores_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.one_rank():
        learner = learner_of(tmp_path)
        before, start = measured(learner)
        lines = (tmp_path / "step3_ppo" / BEST_OF).read_text(encoding="utf-8").splitlines()
        assert [[json.loads(line)[name] for line in lines] for name in ("scores", "judge")] == start.tolist()
        sampled: list[int] = []
        sample = Learner.sample
        monkeypatch.setattr(Learner, "sample", lambda *given: sampled.append(given[3]) or sample(*given))
        prompts: Any = prompts_to_train_on()
        again = worth.measure(learner, prompts, count_of_words, before)
        assert again is not None and torch.equal(again, start) and not sampled
        rounded = replace(before, scores=before.scores * (1 + 2.0**-9), judge_scores=before.scores)  # other processes
        again = worth.measure(learner, prompts, count_of_words, rounded)
        assert again is not None and torch.equal(again, start) and not sampled
        for other in (replace(before, scores=before.scores + 1), replace(before, judge_scores=before.scores + 1)):
            new = worth.measure(learner, prompts, count_of_words, other)
            assert new is not None and torch.equal(new[0, :, 0], other.scores)
            again = worth.measure(learner, prompts, count_of_words, other)  # the file has the new ones
            assert again is not None and torch.equal(again, new)
        assert sampled == [worth.AT_START] * 2


def test_scores_of_the_same_responses_may_be_rounded() -> None:
    """At most a tenth of the responses may be others; of another seed nearly all are, and of a rare reward some."""
    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)) * 3 - 20
    four, five = scores.clone(), scores.clone()
    four[0, :4] += 5
    five[0, :5] += 5
    assert worth._alike(four, scores) and not worth._alike(five, scores)
    assert worth._alike(scores.bfloat16().float(), scores) and not worth._alike(scores.roll(1), scores)
    rare = (torch.arange(40) % 4 == 0).float()[None]
    assert worth._alike(rare, rare) and not worth._alike(rare.roll(1), rare)
    assert not worth._alike(torch.cat([scores, five]), torch.cat([scores, scores])), "the judge's, too"
    assert worth._alike(scores * 0, scores * 0) and not worth._alike(scores * 0 + 1, scores * 0)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"scores": [1, 2]}\n{"scores": [1]}', '{"scores": 1}', '{"judge": [1]}']
)
def test_a_damaged_file_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / BEST_OF).write_text(content, encoding="utf-8")
    assert worth.read_scores(tmp_path / BEST_OF, 1) is None


def test_two_ranks_have_the_scores_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.one_rank():
        learner = learner_of(tmp_path)
        before, whole = measured(learner)
        (tmp_path / "step3_ppo" / BEST_OF).unlink()
        prompts: Any = prompts_to_train_on()
        parts: list[list[Any]] = []
        monkeypatch.setattr(worth.collectives, "dp_size", lambda: 2)
        for rank in (0, 1):
            own: list[Any] = []
            monkeypatch.setattr(worth.collectives, "dp_rank", lambda rank=rank: rank)
            monkeypatch.setattr(
                heldout.collectives, "gather_replicas", lambda mine, own=own: own.append(mine) or [mine]
            )
            with pytest.raises(RuntimeError):  # half of the rows
                worth.measure(learner, prompts, count_of_words, before)
            parts.append(own)
        both = iter(zip(*parts, strict=True))
        monkeypatch.setattr(heldout.collectives, "gather_replicas", lambda _: [*next(both)])
        start = worth.measure(learner, prompts, count_of_words, before)
    assert start is not None and torch.equal(start, whole)


def test_a_score_that_is_no_number_loses_only_this(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny.one_rank():
        learner = learner_of(tmp_path)
        prompts: Any = prompts_to_train_on()
        before = stage.evaluate(learner, prompts, None)
        before = replace(before, judge_scores=before.scores)
        start = worth.measure(learner, prompts, lambda samples: count_of_words(samples) / 0, before)
    assert start is None and "no best-of-n is reported" in capsys.readouterr().out
    assert worth.worth(start, before, before) == {}


def test_the_numbers_by_hand() -> None:
    """Two of three prompts with responses of 0, 1, 2, 3: best-of-n gains 0, 5/6, 5/4, 3/2 over their mean. The policy
    gains 1/2 there, and 2 over the only response of the third: 1 on average, which is 2.4 of 4."""
    scores = torch.tensor([[2.0, 0.0, 3.0, 1.0], [1.0, 3.0, 2.0, 0.0]])
    start = torch.stack([scores, -scores])
    before = evaluation([2.0, 1.0, 5.0], [-2.0, -1.0, 0.0], 0.0, ["a", "b", "c"])
    after = evaluation([2.0, 2.0, 7.0], [-1.0, -1.0, 0.5], 0.0, ["d", "e", "f"])
    kl = best_of_n.kl(3)
    numbers = worth.worth(start, before, replace(after, kl=torch.tensor([kl, kl, kl])))
    assert numbers["eval_best_of"] == 4 and numbers["eval_score_worth_best_of"] == pytest.approx(2.4)
    assert numbers["eval_score_efficiency"] == pytest.approx(1 / 1.25, rel=1e-6)  # at the KL of the best of 3
    assert (numbers["eval_score_worth_low"], numbers["eval_score_worth_high"]) == (1.0, 4.0)  # t of one degree: 12.7
    # The score chooses, and what it chooses the judge dislikes: no best-of-n has the judge's gain of 1/2.
    assert numbers["eval_judge_worth_best_of"] == 4.0
    assert "eval_score_efficiency_gibbs" not in numbers  # four responses are too few
    unjudged = replace(before, judge_scores=None)
    assert "eval_judge_worth_best_of" not in worth.worth(start, unjudged, after)
    endless = worth.worth(start, before, replace(after, scores=after.scores / 0))
    assert [name for name in endless if "score" in name] == []
    assert worth.worth(None, before, after) == {}


def test_the_gain_of_the_gibbs_policy_is_beside_it_where_the_sample_is_large_enough() -> None:
    scores = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    start = scores[None]
    before = evaluation(scores[:, 0].tolist(), None, 0.0, ["a"] * 40)
    after = replace(before, scores=scores.mean(1) + 1.0, kl=torch.ones(40))
    numbers = worth.worth(start, before, after)  # normal scores: the Gibbs policy of 1 nat gains sqrt 2
    assert numbers["eval_score_efficiency_gibbs"] == pytest.approx(1 / 2**0.5, rel=0.05)
    assert numbers["eval_score_efficiency_gibbs"] < numbers["eval_score_efficiency"]
    assert "eval_score_efficiency_gibbs" not in worth.worth(start, before, replace(after, kl=torch.full((40,), 4.0)))


def run(out: Path, **changes: Any) -> tuple[list[Any], dict[str, float]]:
    """The rows of training without their seconds, and the numbers of the manifest."""
    (out / "noise.py").write_text(NOISE, encoding="utf-8")
    options = {"actor_model": "demo-llama", "response_length": 8, "total_episodes": 256, "eval_samples": 8}
    options |= {"reward": f"{out}/noise.py:score", "judge": f"{out}/noise.py:score", "learning_rate": 1e-3}
    values = {**SMALL, **options, "algorithm": "rloo", "output_dir": str(out / "run"), **changes}
    stage.run(plugins.find("step3_ppo.algorithms", "rloo").Config(**values))
    folder = out / "run/step3_ppo"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = ("seconds", "tokens_per_second", "peak_memory")
    train = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows if row["kind"] == "train"]
    return train, json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["metrics"]


def test_training_is_as_without_it_and_a_longer_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, with_it = tmp_path / "plain", tmp_path / "with"
    for folder in (plain, with_it):
        folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(stage, "measure", lambda *_: None)
        rows, numbers = run(plain)
    own_rows, own_numbers = run(with_it, keep_last_checkpoint=True)
    assert own_rows == rows and {name: own_numbers[name] for name in numbers} == numbers
    new = {"eval_best_of": 4.0} | {name: own_numbers[name] for name in own_numbers if "worth" in name}
    assert len(new) == 7 and own_numbers["eval_best_of"] == 4.0
    kept = (with_it / "run/step3_ppo" / BEST_OF).read_bytes()
    monkeypatch.setattr(worth, "combined_scores", lambda *_: pytest.fail("sampled again"))
    run(with_it, keep_last_checkpoint=True, total_episodes=288)
    assert (with_it / "run/step3_ppo" / BEST_OF).read_bytes() == kept
