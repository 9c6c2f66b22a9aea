"""How good a score source is at choosing: the score, by the judge, of the response that it selects among n."""

from dataclasses import dataclass

from torch import Tensor

from rlhf.maths import best_of_n
from rlhf.maths.intervals import Interval, mean_interval

ROUNDING = 1e-9
"""of the largest score: a smaller gain is the rounding of sums"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Best-of-n of one policy: the selected response's score by the judge, over prompts."""

    policy: str
    n: int
    kl: float
    """to the policy, nats per response"""
    score: Interval
    gain: Interval
    """over a response without selection, prompt by prompt"""
    share: float | None
    """the gain as a share of the gain if the judge itself selects; None if the judge has nothing to gain"""


def selections(policy: str, selector: Tensor, scores: Tensor) -> list[Selection]:
    """The curve over n of K responses to each of N prompts. selector, scores [N, K]: by the selector and the judge."""
    result, scores = [], scores.double()
    for n in best_of_n.sizes(scores.shape[1])[1:]:
        selected, best = (best_of_n.expected_score(by, scores, n) for by in (selector, scores))
        gain, most = selected - scores.mean(1), (best - scores.mean(1)).mean().item()
        share = gain.mean().item() / most if most > ROUNDING * scores.abs().max().item() else None
        result.append(Selection(policy, n, best_of_n.kl(n), mean_interval(selected), mean_interval(gain), share))
    return result
