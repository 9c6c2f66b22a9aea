"""Rejection sampling: whom it chooses, against the exact law of the best of K; what it learns; what it writes down."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.prepare.mixture import open_origin
from rlhf import plugins
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.models.policy import Policy
from rlhf.types import Message, Row, Samples, ScoredRollout
from step3_ppo import inputs
from step3_ppo.algorithms.best_of_n import BestOfN, Config, build
from step3_ppo.learner import append_selected
from step3_ppo.update import CreditedRollout, gather
from tests.support.players import first, language_model, on_stage, players, twice_each


def built(group: int, **changes: Any) -> BestOfN:
    return build(Config(algorithm="best_of_n", num_generations=group, batch_size=group, **changes))


def one_token(ids: Tensor, scores: Tensor, logprobs: Tensor) -> ScoredRollout:
    """Responses of one token to one prompt; ids [B], scores of each id [V], log-probs of each id [V]."""
    size, real = len(ids), torch.ones(len(ids), 1, dtype=torch.bool)
    return ScoredRollout(
        prompt_ids=torch.zeros(size, 1, dtype=torch.long),
        prompt_mask=real,
        response_ids=ids[:, None],
        mask=real,
        sampled_logprobs=logprobs[ids][:, None],
        ended=real[:, 0],
        rows=(Row((Message("user", "x"),)),) * size,
        logprobs=logprobs[ids][:, None],
        ref_logprobs=logprobs[ids][:, None],
        scores=scores[ids],
        source_scores=torch.empty(size, 0),
    )


def best_of(law: Tensor, scores: Tensor, group: int) -> Tensor:
    """The law of the best of K draws: F(y)^K - F(y-)^K, shared among arms of one score as the law has them. [V]"""
    result = torch.zeros_like(law)
    for i in range(len(law)):
        upto, below, same = (law[at].sum() for at in (scores <= scores[i], scores < scores[i], scores == scores[i]))
        result[i] = (upto**group - below**group) * law[i] / same
    return result


LAW = torch.tensor([0.4, 0.1, 0.25, 0.2, 0.05], dtype=torch.float64)
SCORES = torch.tensor([0.5, 3.0, -1.0, 0.5, 2.0])
"""two arms are equals, and the likeliest arm is not the best"""


@pytest.mark.parametrize("group", [2, 3, 4])
def test_the_best_of_all_groups_there_can_be_has_the_exact_law(group: int) -> None:
    """Every group of K arms once, each as likely as its draws are: no sampling error."""
    groups = torch.tensor(list(itertools.product(range(len(LAW)), repeat=group)))
    rollout = one_token(groups.flatten(), SCORES, LAW.log().float())
    rows = built(group).select(rollout)
    assert rows.shape == (len(groups),) and rows.dtype == torch.long
    assert torch.equal(rows // group, torch.arange(len(groups)))  # one of each group, in their order
    law = torch.zeros_like(LAW).index_add(0, rollout.response_ids[rows, 0], LAW[groups].prod(1))
    torch.testing.assert_close(law, best_of(LAW, SCORES, group), rtol=0, atol=1e-12)


def test_two_groups_by_hand() -> None:
    rollout = one_token(torch.tensor([0, 4, 2, 0, 3, 2]), SCORES, LAW.log().float())
    assert built(3).select(rollout).tolist() == [1, 3]  # arms 0 and 3 score alike: the first
    algorithm = built(3)
    credit = algorithm.credit(rollout, first(algorithm))
    assert credit.advantages[:, 0].tolist() == [0, 1, 0, 1, 0, 0]
    assert credit.returns[:, 0].tolist() == [0.5, 2.0, -1.0, 0.5, 0.5, -1.0]


@pytest.mark.usefixtures("ranks")
def test_the_gradient_is_that_of_cross_entropy_on_the_chosen_responses() -> None:
    """Against torch's cross-entropy over one chosen response at a time, through the real model."""
    game = players("best_of_n")
    rollout = game.score(game.sample(twice_each()))
    rows = game.algorithm.select(rollout)
    chosen, credit = rollout[rows], game.algorithm.credit(rollout, first(game.algorithm))[rows]
    policy = Policy(language_model())
    weight = policy.lm.get_input_embeddings().weight
    logprobs = policy(chosen.sequences, 1.0)[0][:, chosen.prompt_ids.shape[1] :]
    loss, metrics = game.algorithm.policy_loss(logprobs, chosen, credit, chosen.mask.sum(), first(game.algorithm))
    (gradient,) = torch.autograd.grad(loss, weight)
    total = torch.zeros(())
    for row in range(len(chosen)):
        prompt = chosen.prompt_ids[row][chosen.prompt_mask[row]]
        ids = torch.cat([prompt, chosen.response_ids[row][chosen.mask[row]]])
        logits = policy.lm(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[len(prompt) :], reduction="sum")
    mean = total / chosen.mask.sum()
    (expected,) = torch.autograd.grad(mean, weight)
    assert loss.item() == pytest.approx(mean.item(), abs=1e-5)
    assert metrics["nll"].item() == pytest.approx(mean.item(), abs=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("ranks")
def test_the_chosen_rows_alone_are_the_update() -> None:
    """What was not chosen changes nothing: an update on the chosen rows, whatever the others were."""
    game = players("best_of_n", num_ppo_epochs=4, num_mini_batches=1)
    rollout = game.score(game.sample(twice_each()))
    rows = game.algorithm.select(rollout)
    credit = game.algorithm.credit(rollout, first(game.algorithm))
    assert rows.shape == (4,) and credit.advantages[rows][rollout.mask[rows]].eq(1).all()
    before = rollout.logprobs
    metrics = game.update(rollout[rows], credit[rows])
    assert metrics["optimizer_steps"] == 4 and abs(metrics["first_approx_kl"]) < 1e-6
    after = game.score(rollout).logprobs
    assert before is not None and after is not None
    gain = (after - before).sum(1)
    assert gain[rows].mean() > 0.05
    control = on_stage(game).kl
    control.observe(3.0, 1.0, 0)
    assert control.coef == 0.0


@pytest.mark.parametrize(
    ("options", "ranks", "multiple"),
    [
        ({"num_generations": 4, "batch_size": 10}, 1, 4),
        ({"num_generations": 4, "batch_size": 8, "num_mini_batches": 4}, 1, 16),
        ({"num_generations": 4, "batch_size": 16, "num_mini_batches": 4}, 2, 32),
    ],
)
def test_every_mini_batch_of_every_rank_has_a_chosen_response(options: Any, ranks: int, multiple: int) -> None:
    config = plugins.find("step3_ppo.algorithms", "best_of_n").Config(algorithm="best_of_n", **options)
    with pytest.raises(UserError, match=f"expected a multiple of {multiple} "):
        inputs.check_batches(config, ranks)


# --- the file of chosen responses


PROMPTS = (
    (Message("user", "why?"),),
    (Message("system", "be brief"), Message("user", "why?")),
    (Message("user", "hi"), Message("assistant", "yes?"), Message("user", "né\u2028\nw")),
    (Message("user", "\n\nHuman: a\n\nAssistant:"),),
    (Message("user", " Human: a Assistant:"),),
)
RESPONSES = ("because", "  spaces  ", "a\n\nHuman: b", "née\u2028", "[1, 2]")


def scored(prompts: tuple[tuple[Message, ...], ...], scores: list[float]) -> ScoredRollout:
    size = len(prompts)
    rollout = one_token(torch.zeros(size, dtype=torch.long), torch.zeros(1), torch.zeros(1))
    return replace(rollout, rows=tuple(Row(prompt, "old", "worse") for prompt in prompts), scores=torch.tensor(scores))


def test_the_data_layer_reads_the_same_rows_back(tmp_path: Path) -> None:
    file = tmp_path / "chosen.jsonl"
    scores = [0.5, -1.0, 2.0, 3.25, 0.0]
    rollout, variables = scored(PROMPTS, scores), {"tools": [{"name": "look"}], "enable_thinking": False}
    rollout = replace(rollout, rows=tuple(replace(row, variables=variables) for row in rollout.rows))
    for iteration in (1, 2):
        append_selected(file, iteration, rollout, Samples(("",) * 5, RESPONSES, rollout, ()))
    rows = list(open_origin(str(file)).rows("sft"))
    expected = [
        Row(prompt, response, None, "", {"score": score, "iteration": iteration}, variables=variables)
        for iteration in (1, 2)
        for prompt, response, score in zip(PROMPTS, RESPONSES, scores, strict=True)
    ]
    assert all(isinstance(row, Row) for row in rows)
    assert [replace(row, group="") for row in rows] == expected  # type: ignore[type-var]
    assert json.loads(file.read_text(encoding="utf-8").split("\n")[0])["prompt"] == "why?"


def test_a_response_that_was_cut_is_no_demonstration(tmp_path: Path) -> None:
    rollout = scored(PROMPTS[:3], [1.0, 2.0, 3.0])
    rollout = replace(rollout, ended=torch.tensor([True, False, True]))
    append_selected(tmp_path / "chosen.jsonl", 1, rollout, Samples(("",) * 3, RESPONSES[:3], rollout, ()))
    rows = [json.loads(line) for line in (tmp_path / "chosen.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert [row["score"] for row in rows] == [1.0, 3.0]


def test_rank_0_writes_the_rows_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []

    def write(rank: int) -> None:
        rollout = scored(PROMPTS[:2], [float(rank), 10.0 + rank])
        monkeypatch.setattr(collectives, "is_main", lambda: rank == 0)
        samples = Samples(("",) * 2, (f"a of {rank}", f"b of {rank}"), rollout, ())
        append_selected(tmp_path / "c.jsonl", 7, rollout, samples)

    monkeypatch.setattr(collectives, "gather_objects", lambda value: gathered.append(value) or [])
    write(1)
    assert not (tmp_path / "c.jsonl").exists() and len(gathered) == 1
    monkeypatch.setattr(collectives, "gather_objects", lambda value: [value, *gathered])
    write(0)
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    written = [(row["response"], row["score"], row["iteration"]) for row in rows]
    assert written == [("a of 0", 0.0, 7), ("b of 0", 10.0, 7), ("a of 1", 1.0, 7), ("b of 1", 11.0, 7)]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("count", "ranks"), [(0, 1), (2, 1), (0, 2), (2, 2), (4, 2)])
def test_a_selection_that_leaves_a_rank_without_a_part_of_a_minibatch_is_an_error(
    count: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = players("best_of_n")
    rollout = game.score(game.sample(twice_each()))
    credited = CreditedRollout(rollout, game.algorithm.credit(rollout, first(game.algorithm)))
    monkeypatch.setattr(collectives, "gather_replicas", lambda part: [part] * ranks)
    with pytest.raises(UserError, match=f"chose {', '.join([str(count)] * ranks)} responses on .*-mini-batches 3"):
        gather(credited[torch.arange(count)], [0] * count, 1, 3)
    whole, _ = gather(credited[torch.arange(3)], [0] * 3, 1, 3)
    assert len(whole) == 3 * ranks
