"""The penalty on the KL to the reference: its options, and the controller of its coefficient."""

import math
from typing import Self

from pydantic import Field, model_validator

from step3_ppo.config import Step3Config

RISE = 0.3
"""share of the run over which the wanted KL rises from 0 to the target"""
FLOOR = 0.1
"""share of the target that is added to both KLs, so that noise near 0 does not count as a large ratio"""
ABOVE, BELOW = (2.0, 24.0), (1.0, 12.0)
"""how far an error of 1 moves the logarithm of the coefficient: at once, and if it lasts for the whole run. 12 are a
factor of 36 in 0.3 of the run. Below the wanted KL they are smaller: a policy that ran away at a low coefficient
comes back slowly, if at all; one that is held back loses little"""


class KLOptions(Step3Config):
    """The options of an algorithm with a KL penalty: the weight of the KL to the reference."""

    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL to the reference, in the per-token reward or (grpo) in the loss"""
    kl_target: float | None = Field(None, gt=0)
    """KL of a response, nats, to which the run is steered by changing kl_coef after each iteration; none: kl_coef is
    constant"""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_coef 0: expected more than 0 with kl_target, which multiplies it")
        return self


class KLController:
    """The coefficient of this iteration; `observe` moves it so that the KL follows the wanted one.

    A proportional and integral controller of the coefficient's logarithm (A. Stooke et al., arXiv 2007.03964, have it
    for the multiplier of a constraint):

        wanted = target * min(1, (iteration - 1) / (RISE * iterations))^2
        e      = clip(log((kl + FLOOR * target) / (wanted + FLOOR * target)), -1, 1)
        base  *= exp(i * e / iterations);   kl_coef = base * exp(p * e);   (p, i) = ABOVE if e > 0 else BELOW

    The KL of a run starts at 0. If the target itself were wanted from the start, the coefficient would fall until the
    KL is near it, and the policy would run past it. The wanted KL rises as that of a policy that moves evenly, whose KL
    grows with the square of the distance: a coefficient that is too low shows while the policy is still near. Above the
    wanted KL and below the target `base` stays: it would grow until the penalty drowns the score.

    The coefficient is 0 and stays 0 without options: the algorithm's Config is not a `KLOptions`.
    """

    def __init__(self, options: KLOptions | None) -> None:
        self._options = options
        self.coef = self._first = self._base = 0.0 if options is None else options.kl_coef
        self._observed = 0

    def observe(self, kl: float) -> None:
        """`kl`: mean over the responses of an iteration of the KL summed over a response, nats."""
        o = self._options
        if o is None or o.kl_target is None:
            return
        assert math.isfinite(kl), f"the KL is {kl}"
        iterations = max(1, o.total_episodes // o.batch_size - o.critic_warmup_iterations)
        floor, wanted = FLOOR * o.kl_target, o.kl_target * min(1.0, self._observed / (RISE * iterations)) ** 2
        ratio = (kl + floor) / (wanted + floor)
        error = min(max(math.log(ratio), -1.0), 1.0) if ratio > 0 else -1.0  # an estimate may be below 0
        self._observed += 1
        at_once, lasting = ABOVE if error > 0 else BELOW
        if error < 0 or kl > o.kl_target:
            self._base *= math.exp(lasting * error / iterations)
        self.coef = self._base * math.exp(at_once * error)

    def state_dict(self) -> dict[str, float]:
        """The coefficient, what it is computed from, and the coefficient in the options."""
        return {"kl_coef": self.coef, "kl_base": self._base, "observed": self._observed, "first_kl_coef": self._first}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from `state`. If the coefficient in the options has changed, use the new one."""
        self._observed = int(state.get("observed", 0))
        if state["first_kl_coef"] == self._first:
            self.coef, self._base = state["kl_coef"], state.get("kl_base", state["kl_coef"])
