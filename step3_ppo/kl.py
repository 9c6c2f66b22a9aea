"""The penalty on the KL to the reference: its options, and the controller of its coefficient."""

from typing import Self

from pydantic import Field, model_validator

from rlhf.maths import credit as crediting
from step3_ppo.config import Step3Config


class KLOptions(Step3Config):
    """The weight of the KL to the reference."""

    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL to the reference, in the per-token reward or (grpo) in the loss"""
    kl_target: float | None = Field(None, gt=0)
    """KL of a response, nats, towards which kl_coef is adapted after each iteration; none: kl_coef is constant"""
    kl_horizon: int = Field(10_000, ge=1)
    """responses over which kl_coef changes by at most a fifth; above a fifth of batch_size"""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.kl_target is not None and self.batch_size >= 5 * self.kl_horizon:
            raise ValueError(
                f"kl_horizon {self.kl_horizon}: expected more than a fifth of batch_size {self.batch_size}"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_coef 0: expected more than 0 with kl_target, which multiplies it")
        return self


class KLController:
    """The coefficient of this iteration; `observe` moves it towards the target (Ziegler et al., arXiv 1909.08593).

    It is 0 and stays 0 for an algorithm whose Config is not a `KLOptions`.
    """

    def __init__(self, config: Step3Config) -> None:
        self._config = config if isinstance(config, KLOptions) else None
        self.coef = self._first = 0.0 if self._config is None else self._config.kl_coef

    def observe(self, kl: float, episodes: int) -> None:
        """`kl`: mean over the `episodes` responses of an iteration of the KL summed over a response, nats."""
        c = self._config
        if c is not None and c.kl_target is not None:
            self.coef = crediting.adapt_kl_coef(self.coef, kl, c.kl_target, episodes, c.kl_horizon)

    def state_dict(self) -> dict[str, float]:
        """The coefficient, and the coefficient in the options."""
        return {"kl_coef": self.coef, "first_kl_coef": self._first}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from `state`. If the coefficient in the options has changed, use the new one."""
        if state["first_kl_coef"] == self._first:
            self.coef = state["kl_coef"]
