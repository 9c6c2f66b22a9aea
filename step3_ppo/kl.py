"""The penalty on the KL to the reference: its options, and the controller of its coefficient."""

from typing import Self

from pydantic import Field, model_validator

from step3_ppo.config import Step3Config


class KLOptions(Step3Config):
    """The options of an algorithm with a KL penalty: the weight of the KL to the reference."""

    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL to the reference, in the per-token reward or (grpo) in the loss"""
    kl_target: float | None = Field(None, gt=0)
    """KL of a response, nats, towards which kl_coef is adapted after each iteration; none: kl_coef is constant"""
    kl_horizon: int | None = Field(None, ge=1)
    """responses over which kl_coef changes by at most a fifth; above a fifth of batch_size. None: a tenth of
    total_episodes, so that kl_coef can change sevenfold in a run"""

    @property
    def horizon(self) -> int:
        """`kl_horizon`, or its default: in a run of few iterations half of batch_size."""
        return self.kl_horizon or max(self.total_episodes // 10, self.batch_size // 2, 1)

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.kl_target is not None and self.batch_size >= 5 * self.horizon:
            raise ValueError(f"kl_horizon {self.horizon}: expected more than a fifth of batch_size {self.batch_size}")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_coef 0: expected more than 0 with kl_target, which multiplies it")
        return self


class KLController:
    """The coefficient of this iteration; `observe` moves it towards the target (Ziegler et al., arXiv 1909.08593).

    It is 0 and stays 0 without options: the algorithm's Config is not a `KLOptions`.
    """

    def __init__(self, options: KLOptions | None) -> None:
        self._options = options
        self.coef = self._first = 0.0 if options is None else options.kl_coef

    def observe(self, kl: float, episodes: int) -> None:
        """`kl`: mean over the `episodes` responses of an iteration of the KL summed over a response, nats."""
        o = self._options
        if o is not None and o.kl_target is not None:
            from rlhf.maths import credit as crediting  # imported here because it imports torch, and --help needs none

            self.coef = crediting.adapt_kl_coef(self.coef, kl, o.kl_target, episodes, o.horizon)

    def state_dict(self) -> dict[str, float]:
        """The coefficient, and the coefficient in the options."""
        return {"kl_coef": self.coef, "first_kl_coef": self._first}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from `state`. If the coefficient in the options has changed, use the new one."""
        if state["first_kl_coef"] == self._first:
            self.coef = state["kl_coef"]
