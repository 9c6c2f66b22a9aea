"""The penalty on the KL to the reference: its options, and the controller of its coefficient."""

import math
from collections.abc import Mapping

from pydantic import Field

from step3_ppo.config import Step3Config

START = 0.4
"""kl_coef at which a run with a budget starts, over that of the best policy of this KL if scores are normal. The tuned
constant ones are 0.23 of it in configs/recipes/stories260k-sentiment-cpu.yaml and 0.41 in configs/demo.yaml"""
FLOOR = 0.1
"""share of the budget that is added to both KLs, so that noise near 0 does not count as a large ratio"""
AT_ONCE, LASTING = 2.0, 12.0
"""how far an error of 1 moves the logarithm of the coefficient: at once, and if it lasts for the whole run. 12 are a
factor of 36 in 0.3 of the run. They are alike in both directions, so that noise pulls neither way"""


class KLOptions(Step3Config):
    """The options of an algorithm with a KL penalty: the weight of the KL to the reference."""

    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL to the reference, in the per-token reward or (grpo) in the loss"""
    kl_budget: float | None = Field(None, gt=0)
    """KL of a response, nats, that the run spends: kl_coef starts at what the spread of the scores says, and is changed
    in each iteration so that the KL reaches the budget at the end; keep_best skips policies above it. kl_coef has no
    effect then; none: no budget"""

    def score_scale(self, deviation: float) -> float:
        """The standard deviation over responses of what the algorithm weighs against the KL. deviation: of the scores,
        which GRPO divides by that of their group first"""
        return deviation


class KLController:
    """The coefficient of an iteration. It is `kl_coef`, or `observe` moves it so that the KL follows the wanted one.

    A proportional and integral controller of the coefficient's logarithm (A. Stooke et al., arXiv 2007.03964, have it
    for the multiplier of a constraint). kl is in units of the budget, t the share of the run that is past:

        wanted = clip(kl, (1 - (1 - t)^2)^2, 1 - (1 - t)^4)
        e      = clip(log((kl + FLOOR) / (wanted + FLOOR)), -1, 1)
        base  *= exp(min(1, LASTING / iterations) * e);   kl_coef = base * exp(AT_ONCE * e)

    e is 0 between the two curves. There runs with a constant coefficient come to their last KL: those that a small
    learning rate holds back near the lower one, the square of the travel at a rate that falls linearly, as the KL is
    near the reference. So a coefficient that is right is left alone until the end, where the curves meet. The best
    policy is proportional to pi_ref * exp(score / kl_coef); for normal scores of deviation s its KL is
    s^2 / (2 kl_coef^2). base starts at START times the coefficient that makes this the budget. Until scores differ it
    is 0. Above the wanted KL and below the budget `base` stays: it would grow until the penalty drowns the score.

    The coefficient is 0 and stays 0 without options: the algorithm's Config is not a `KLOptions`.
    """

    def __init__(self, options: KLOptions | None) -> None:
        self._options = options
        self._first = 0.0 if options is None or options.kl_budget is not None else options.kl_coef
        self.coef = self._base = self._first

    @property
    def note(self) -> str | None:
        """What the user is told of a `kl_coef` beside a budget, which a recipe may have."""
        o = self._options
        if o is None or o.kl_budget is None or o.kl_coef == type(o).model_fields["kl_coef"].default:
            return None
        return f"kl_coef {o.kl_coef:g} has no effect: kl_budget {o.kl_budget:g} finds the coefficient"

    @property
    def closer(self) -> str:
        """What keeps the policy closer to its reference, for warnings. Only a constant coefficient is the user's."""
        o = self._options
        if o is None:
            return "lower --total-episodes"
        return "raise --kl-coef" if o.kl_budget is None else "lower --kl-budget"

    @property
    def budget(self) -> float | None:
        """KL of a response, nats; None: the coefficient is constant."""
        return None if self._options is None else self._options.kl_budget

    def observe(self, kl: float, score_deviation: float, iteration: int) -> None:
        """With the rollout of an iteration, which has a number from 0 without those in which only the critic learns.

        kl: mean over its responses of the KL summed over a response, nats. score_deviation: over its responses
        """
        o, budget = self._options, self.budget
        if o is None or budget is None:
            return
        assert math.isfinite(kl), f"the KL is {kl}"
        if self._base == 0:  # until scores differ
            self._base = START * o.score_scale(score_deviation) / math.sqrt(2 * budget)
        iterations = max(1, o.total_episodes // o.batch_size - o.critic_warmup_iterations)
        left = 1 - iteration / iterations
        wanted = min(max(kl / budget, (1 - left**2) ** 2), 1 - left**4)
        ratio = (kl / budget + FLOOR) / (wanted + FLOOR)
        error = min(max(math.log(ratio), -1.0), 1.0) if ratio > 0 else -1.0  # an estimate may be below 0
        if error < 0 or kl > budget:
            self._base *= math.exp(min(1.0, LASTING / iterations) * error)
        self.coef = self._base * math.exp(AT_ONCE * error)

    def admits(self, evaluation: Mapping[str, float]) -> bool:
        """Whether the KL on held-out prompts is within the budget, or above it by less than its 95 % interval."""
        return self.budget is None or evaluation["eval_kl"] - evaluation["eval_kl_ci95"] <= self.budget

    def state_dict(self) -> dict[str, float]:
        """The coefficient, what it is computed from, and the coefficient in the options."""
        return {"kl_coef": self.coef, "kl_base": self._base, "first_kl_coef": self._first}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from `state`. A constant coefficient is that of the options."""
        if self.budget is not None and state["first_kl_coef"] == self._first:
            self.coef, self._base = state["kl_coef"], state["kl_base"]
