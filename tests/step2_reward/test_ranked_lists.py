"""K ranked responses are one element of the reward model's batch: equation 1 of InstructGPT (arXiv 2203.02155)."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from data.prepare.pipeline import batch_elements
from rlhf.engine.training import Engine
from rlhf.models.scalar import score_joined, score_separately
from rlhf.supervised.runner import batches_for
from rlhf.types import Metrics, Pairs
from step2_reward import heldout
from step2_reward.stage import scoring
from tests.support import reward_runs, tiny
from tests.support.reward_runs import CENTERING, comparisons, records, scores_of

PAIRS = [1, 3, 6, 5, 2, 1, 3, 6, 1, 1, 1, 1, 1]
"""comparisons of each record, counted by hand: C(K, 2) without ties, equal texts and those with too long a response"""
EPS = 1e-5
"""of numbers near 1: some 100 operations in fp32 in a row, each of them off by 6e-8 at most"""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def calibration_error(sides: Tensor) -> float:
    """Over six ranges of the predicted share, the distance of the sums of predicted and right pairs."""
    gaps = sides.double().view(-1, 2)[:, 0] - sides.double().view(-1, 2)[:, 1]
    predicted, error = torch.sigmoid(gaps.abs()), 0.0
    for low in range(6):
        inside = (predicted >= 0.5 + low / 12) & (predicted < 0.5 + (low + 1) / 12)
        error += abs((gaps[inside] > 0).sum().item() - predicted[inside].sum().item())
    return error / len(gaps)


def test_held_out_pairs_count_by_their_weights() -> None:
    """Weights 3, 1 and 1/2, or a tenth of these, of gaps 1, -2 and 0. Columns: chosen, rejected, weight, length."""
    scored = torch.tensor([[2.0, 1.0, 3.0, 1.0], [0.0, 2.0, 1.0, 1.0], [1.0, 1.0, 0.5, -1.0]])
    loss = 3 * math.log1p(math.exp(-1)) + math.log1p(math.exp(2)) + 0.5 * math.log(2)
    expected = {"eval_accuracy": 3.25 / 4.5, "eval_loss": loss / 4.5, "eval_margin": 1 / 4.5}
    for scale in (1.0, 0.1):
        metrics = heldout.evaluate(scored * torch.tensor([1.0, 1.0, scale, 1.0]), 0.1)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert heldout.evaluate(scored[:1].expand(49, -1), 0.1)["eval_accuracy"] == 1.0


@pytest.mark.parametrize(("pair_scores", "micro"), [(score_separately, 3), (score_joined, 40)], ids=["apart", "joined"])
def test_each_prompt_weighs_the_same_as_equation_1_says(
    tmp_path: Path, pair_scores: Any, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def step(engine: Engine, micros: list[Pairs], loss: Any, rows: list[list[int]]) -> Metrics:
        """Its own, having looked whether `rows` are the numbers of each micro-batch's pairs."""
        dataset = reward_runs.rows_of(reward_runs.config_of(tmp_path))
        for pairs, numbers in zip(micros, rows, strict=True):
            sizes.append(len(pairs))
            assert pairs.chosen.lengths.tolist() == [len(dataset[number].chosen) for number in numbers]  # type: ignore[union-attr]
        return plain_step(engine, micros, loss, rows)

    plain_step = Engine.step
    monkeypatch.setattr(Engine, "step", step)
    result = reward_runs.run(tmp_path, pair_scores, micro_batch_size=micro, num_train_epochs=2)
    assert max(sizes) == min(micro, sum(PAIRS))
    assert [len(list(comparisons(record))) for record in records()] == PAIRS
    model = reward_runs.scalar_model().double()
    losses, plain, accuracies, margins, sides, longer = [], [], [], [], [], []
    by_length: dict[str, list[tuple[float, bool]]] = {"longer": [], "shorter": []}
    for record in records():
        pairs = list(scores_of(model, record))
        losses.append(sum(CENTERING * (c + r) ** 2 - logsigmoid(c - r - m) for c, r, m in pairs) / len(pairs))
        plain.append(sum(-logsigmoid(c - r) for c, r, _ in pairs) / len(pairs))
        accuracies.append(sum(float(c > r) for c, r, _ in pairs) / len(pairs))
        margins.append(sum(c.item() - r.item() for c, r, _ in pairs) / len(pairs))
        lengths = [len(better.split()) - len(worse.split()) for better, worse, _ in comparisons(record)]
        longer.append(sum(0.5 * (gap > 0) + 0.5 * (gap >= 0) for gap in lengths) / len(lengths))
        for gap, (c, r, _) in zip(lengths, pairs, strict=True):
            by_length["longer" if gap > 0 else "shorter"] += [(1 / len(pairs), bool(c > r))] if gap else []
        sides += [side.item() for c, r, _ in pairs for side in (c, r)]
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
    metrics, _second_epoch = result["metrics"]
    assert metrics["loss"] == pytest.approx(loss.item(), abs=EPS)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=EPS)
    assert metrics["accuracy"] == pytest.approx(sum(accuracies) / len(accuracies), abs=EPS)
    assert metrics["margin"] == pytest.approx(sum(margins) / len(margins), abs=EPS)
    assert result["before"].pop("eval_ece") == pytest.approx(calibration_error(torch.tensor(sides)), abs=EPS)
    assert result["before"] == pytest.approx(
        {
            "eval_length_rule": sum(longer) / len(longer),
            **{
                f"eval_accuracy_if_{name}": sum(w * right for w, right in weighted) / sum(w for w, _ in weighted)
                for name, weighted in by_length.items()
            },
            "eval_accuracy": metrics["accuracy"],
            "eval_loss": torch.stack(plain).mean().item(),
            "eval_margin": metrics["margin"],
            "eval_score_mean": torch.tensor(sides).mean().item(),
            "eval_score_std": torch.tensor(sides).std(correction=0).item(),
        },
        abs=EPS,
    )


def test_a_list_that_comes_again_is_another_element() -> None:
    """Three pairs of list 7, of which a weight repeats two; a pair of its own, twice; the one pair of list 9."""
    rankings, index = np.array([0, 7, 7, 0, 7, 9, 7, 7], dtype=np.uint64), np.array([0, 1, 2, 0, 3, 4, 1, 2])
    assert batch_elements(rankings, index).tolist() == [0, 1, 1, 2, 1, 3, 4, 4]
    assert batch_elements(np.zeros(3, dtype=np.uint64), np.array([5, 5, 1])).tolist() == [0, 1, 2]


def test_what_is_left_of_a_list_weighs_as_much_as_the_whole(tmp_path: Path) -> None:
    """With 17 rows each of the 13 records has one pair, and some have a second one. Every file has its own lists."""
    rows = reward_runs.rows_of(reward_runs.config_of(tmp_path, max_train_rows=17))
    assert rows.batch_elements == rows.weights.sum() == 13 < len(rows) <= 17
    assert set(rows.weights) == {0.5, 1.0}
    copy = tmp_path / "copy.jsonl"
    copy.write_text((tmp_path / "ranked.jsonl").read_text())
    twice = reward_runs.rows_of(reward_runs.config_of(tmp_path, data_path=(f"{tmp_path}/ranked.jsonl", str(copy))))
    assert twice.batch_elements == 2 * 8


def test_each_option_of_batches_arrives(tmp_path: Path) -> None:
    dataset = reward_runs.rows_of(reward_runs.config_of(tmp_path))

    def dealt(ranks: tuple[int, int] = (0, 1), **options: Any) -> list[list[int]]:
        config = reward_runs.config_of(tmp_path, **{"batch_size": 4} | options)
        return list(batches_for(dataset, config, ranks))

    plain = dealt()
    assert [len({dataset.elements[row] for row in batch}) for batch in plain] == [4, 4, 4, 1]  # type: ignore[index]
    changes: list[dict[str, Any]] = [{"seed": 3}, {"batch_size": 6}, {"batch_tokens": 400}, {"group_by_length": False}]
    for option in (*changes, {"ranks": (0, 2)}, {"ranks": (1, 2)}):
        assert dealt(**option) != plain, option
    assert dealt(group_by_length=False, batch_tokens=400) == dealt(batch_tokens=400)


@pytest.mark.parametrize(
    ("family", "prompt", "way"),
    [("llama", 8, score_joined), ("llama", 0, score_separately), ("bloom", 8, score_separately)],
)
def test_pairs_are_in_one_row_where_the_model_can_and_that_saves_tokens(
    family: str, prompt: int, way: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(tiny.WORDS[:prompt]) or "w4"
    rows = [{"prompt": f"{words} w{i}", "chosen": f"w{i} " * 12, "rejected": f"w{i + 9} " * 12} for i in range(9, 40)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = reward_runs.config_of(tmp_path, data_path=(f"{tmp_path}/x.jsonl",), max_length=48)
    dataset = reward_runs.rows_of(config)
    once = np.array([(1 + prompt + 1 if prompt else 3) + 2 * 13] * len(rows))
    assert (dataset.row_lengths.sum(1) == (once if prompt else once + 3)).all()
    engine = Engine(reward_runs.scalar_model(family), config, 1)
    assert scoring(engine, dataset, config, tiny.PAD) is way
    assert ("cannot separate them" in capsys.readouterr().out) == (family == "bloom")


SOURCE = """
import json
import math
from rlhf.config import Config
from rlhf.types import Message, Row
class Mine:
    def __init__(self, place):
        self.rankings = json.load(open(place))
    def rows(self, phase):
        for i, ranking in enumerate(self.rankings):
            yield Row((Message("user", "w9"),), f"w{10 + i}", "w50", ranking=ranking)
def build(config, path):
    return Mine(path)
"""


def test_a_source_of_ones_own_says_what_is_one_list(tmp_path: Path) -> None:
    """Nothing else tells one list from another; rows that were tokenised with other lists are not taken again."""
    (tmp_path / "mine.py").write_text(SOURCE)
    for rankings, weights in ((["a", "", "a", "b", "a"], [1 / 3] * 3 + [1.0] * 2), (["", "", "", "b", "b"], [0.5] * 2)):
        (tmp_path / "rankings.json").write_text(json.dumps(rankings))
        config = reward_runs.config_of(tmp_path, data_path=(f"{tmp_path}/mine.py:{tmp_path}/rankings.json",))
        rows = reward_runs.rows_of(config)
        assert sorted(rows.weights.tolist()) == pytest.approx(weights + [1.0] * (5 - len(weights)))
