"""Every objective adds up over micro-batches; a user's file is checked at the start, and named."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf import plugins
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.types import Sequences
from step2_reward import objectives
from step2_reward.config import RewardConfig
from step2_reward.objectives import ScoredPairs
from step2_reward.stage import REWARD_MODELLING

PAIRS, WIDTH, LONGEST = 6, 5, torch.tensor([4, 1, 5, 3, 2, 5, 4, 2, 5, 1, 2, 3])
COUNT = torch.tensor(5.0)


def scored(scores: Tensor, rows: slice = slice(None), fill: float = 0.0) -> ScoredPairs:
    """Some of six pairs, the last of which has no weight. scores: at each token, [2 B, S]; `fill` is off the mask."""
    mask = torch.arange(WIDTH) < LONGEST[:, None]
    ids = torch.randint(4, 9, (2 * PAIRS, WIDTH), generator=torch.Generator().manual_seed(1))
    chosen = torch.arange(2 * PAIRS).view(2, PAIRS)[:, rows].flatten()
    scalars = torch.where(mask, scores, fill)[chosen]
    ends = scalars.gather(1, LONGEST[chosen, None] - 1).squeeze(1)
    weight, margin = torch.tensor([1, 0.5, 0.5, 1, 1, 0])[rows], torch.linspace(0, 1, PAIRS)[rows]
    sides = Sequences(ids[chosen], mask[chosen], mask[chosen])
    return ScoredPairs(*ends.chunk(2), weight, margin, sides, scalars)


@pytest.mark.parametrize("name", plugins.names(objectives.FOLDER))
def test_an_objective_is_a_weighted_sum_over_pairs(name: str) -> None:
    """Parts add up to the whole; what is off the mask, and a pair of weight 0, has no gradient; the gap grows."""
    fields = plugins.find(objectives.FOLDER, name).Config.model_fields.items()
    options = [f"{option}={field.default + 0.1}" for option, field in fields if isinstance(field.default, float)]
    objective = objectives.load(RewardConfig(objective=",".join([name, *options])))
    scores = torch.randn(2 * PAIRS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores.requires_grad_()
    whole, metrics = objective.loss(scored(scores), COUNT)
    assert losses.fault_of((whole, metrics)) == ""
    parts = [objective.loss(scored(scores, slice(i, i + 2), fill=7.0), COUNT) for i in range(0, PAIRS, 2)]
    torch.testing.assert_close(torch.stack([part for part, _ in parts]).sum(), whole)
    for metric in metrics:
        torch.testing.assert_close(torch.stack([part[metric] for _, part in parts]).sum(), metrics[metric])
    (gradient,) = torch.autograd.grad(whole, scores)
    assert (
        not gradient[[PAIRS - 1, 2 * PAIRS - 1]].any() and not gradient[torch.arange(WIDTH) >= LONGEST[:, None]].any()
    )
    higher, plain = torch.arange(2 * PAIRS)[:, None] < PAIRS, objectives.load(RewardConfig(objective=name))
    assert plain.loss(scored(scores + higher), COUNT)[0] < plain.loss(scored(scores), COUNT)[0]


def loss_of(**options: object) -> float:
    scores = torch.randn(2 * PAIRS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return float(objectives.load(RewardConfig(**options)).loss(scored(scores), COUNT)[0].detach())


MINE = """
from rlhf.config import Config

class Mine:
    def loss(self, pairs, count):
        return (pairs.weight * (pairs.rejected - pairs.chosen)).sum() / count, {}

def build(config):
    return Mine()
"""


def refusal(tmp_path: Path, right: str, wrong: str, options: str = "") -> str:
    """What is said of MINE with `wrong` in place of `right`, at the start or of its first loss."""
    assert right in MINE
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace(right, wrong))
    with pytest.raises(UserError) as refused:
        loss_of(objective=f"{path}{options}")
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "def loss",
            "def score",
            "build returned a value of type Mine, which has no function loss; expected loss(pairs",
        ),
        ("pairs, count):", "pairs):", "Mine: got loss(pairs), expected loss(pairs, count)"),
        ("import Config", "import Config as Base", "has no Config"),
        (
            ".sum() / count, {}",
            ".sum() / count",
            "loss returned a tensor of shape () and torch.float32, expected (loss,",
        ),
        (".sum() / count", "", "loss returned the loss a tensor of shape (6,)"),
        (
            "(pairs.rejected - pairs.chosen)",
            "pairs.weight",
            "the loss a tensor of shape () and torch.float32 without a",
        ),
        ("count, {}", "count, {'x': pairs.chosen}", "loss returned the metric x: a tensor of shape (6,)"),
        ("pairs.chosen", "pairs.best", "in loss: AttributeError: 'ScoredPairs' object has no attribute 'best'"),
    ],
)
def test_a_file_that_lacks_something_is_refused(right: str, wrong: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, right, wrong)


def test_an_option_that_it_does_not_have_is_refused(tmp_path: Path) -> None:
    assert "no option 'gap'" in refusal(tmp_path, "Mine", "Mine", ",gap=2")
    with pytest.raises(UserError, match=r"no 'pairwize' in step2_reward.objectives.*did you mean 'pairwise'"):
        REWARD_MODELLING.check(RewardConfig(objective="pairwize"))


def test_a_changed_file_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    digest = hashlib.sha256(MINE.encode()).hexdigest()
    assert objectives.files(RewardConfig(objective=f"{path},x=1")) == {str(path): digest}
    assert objectives.files(RewardConfig()) == {}
