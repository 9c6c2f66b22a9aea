"""The options of the algorithms of step3_ppo/algorithms. They stand apart from the mathematics, which imports torch, so
that a mistyped option is answered at once."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf import plugins
from rlhf.errors import UserError
from step3_ppo.config import Step3Config
from step3_ppo.kl import KLOptions


class ClippedConfig(Step3Config):
    """Clip the ratio to the policy that sampled."""

    cliprange: float = Field(0.2, gt=0)
    """the policy's ratio counts within 1 +- cliprange"""
    cliprange_high: float | None = Field(None, gt=0)
    """the policy's ratio counts up to 1 + cliprange_high, if another than cliprange (clip-higher: unlikely tokens may
    become likelier)"""
    dual_clip: float | None = Field(None, gt=1)
    """most that the ratio of a token with a negative advantage counts, which has no bound otherwise; 3 is usual"""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """what weighs alike in the policy's loss: token = every token of an optimizer step; sequence = every response;
    constant = every token of the run, as the sum is divided by response_length for each response (Dr. GRPO)"""
    tis_cap: float | None = Field(None, gt=0)
    """weigh each token in the policy's loss by the ratio of its probability in the trainer to that in the sampler, at
    most tis_cap (truncated importance sampling): corrects for a rollout backend whose log-probs differ; none: off"""

    @model_validator(mode="after")
    def _ratios_to_the_sampler_need_both(self) -> Self:
        if self.tis_cap is not None and not self.rescore:
            raise ValueError("tis_cap: expected rescore, which computes the log-probs of the trainer")
        return self


class GAEConfig(KLOptions):
    """Credit by generalised advantage estimation, which needs a critic."""

    gamma: float = Field(1.0, ge=0, le=1)
    """discount per token"""
    lam: float = Field(0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    whiten_advantages: bool = True
    """advantages get mean 0 and variance 1 over all tokens of the iteration on all ranks"""


class PPOConfig(GAEConfig, ClippedConfig):
    """PPO: a policy and a critic, both clipped around their outputs at the rollout (the policy in _clipping.py)."""

    cliprange_value: float = Field(0.2, gt=0)
    """the value counts within +- cliprange_value of the old one"""


class A2CConfig(GAEConfig):
    """A2C: one optimizer step an iteration, so that the policy is the one that sampled."""

    num_ppo_epochs: int = Field(1, ge=1, le=1)
    """passes over an iteration's rollout: one"""
    num_mini_batches: int = Field(1, ge=1, le=1)
    """optimizer steps in a pass: one"""
    whiten_advantages: bool = False
    """advantages get mean 0 and variance 1 over all tokens of the iteration on all ranks"""


class ReinforceConfig(KLOptions, ClippedConfig):
    """REINFORCE++: no critic; a token's advantage is its return, minus the mean over the batch."""

    gamma: float = Field(1.0, ge=0, le=1)
    """discount per token"""


class RLOOConfig(KLOptions, ClippedConfig):
    """RLOO: no critic; a whole response is one action, judged against the others to its prompt."""

    num_generations: int = Field(4, ge=2)
    """responses sampled for each prompt (TRL's rloo_k); batch_size counts responses"""
    whiten_advantages: bool = False
    """advantages get mean 0 and variance 1 over all tokens of the iteration on all ranks"""


class GRPOConfig(KLOptions, ClippedConfig):
    """GRPO: no critic, no KL in the reward; a group's mean is the baseline."""

    num_generations: int = Field(4, ge=2)
    """responses sampled for each prompt; batch_size counts responses"""
    scale_rewards: bool = True
    """divide by the group's standard deviation; off (Dr. GRPO): prompts whose scores vary more weigh more"""
    scale_rewards_by: Literal["group", "batch"] = "group"
    """scale_rewards: batch = divide by the standard deviation of all scores of the iteration instead"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """what the clipped ratio is of: token; sequence = the whole response, whose probability has the power 1 / length
    (GSPO, with loss_aggregation sequence and a cliprange of about 3e-4)"""
    kl_coef: float = Field(0.04, ge=0)
    """weight of the KL to the reference in the loss (TRL's beta)"""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """per-token estimate of the KL in the loss; k2 has the gradient of the KL of a token given those before it, k3 is
    the paper's"""

    def score_scale(self, deviation: float) -> float:
        return 1.0 if self.scale_rewards else deviation


class BestOfNConfig(Step3Config):
    """Best of K: no critic and no KL in reward or loss; the best of each prompt's K responses is a demonstration."""

    num_generations: int = Field(4, ge=2)
    """responses sampled for each prompt; the policy learns the best of them; batch_size counts all of them"""
    num_ppo_epochs: int = Field(1, ge=1)
    """passes over an iteration's chosen responses"""

    @field_validator("use_score_scaling", "score_clip")
    @classmethod
    def _refuse_score_scaling(cls, value: object) -> object:
        if value:
            raise ValueError("has no effect on best_of_n, which only orders the scores of a prompt; remove it")
        return value


BY_NAME: dict[str, type[Step3Config]] = {
    "ppo": PPOConfig,
    "a2c": A2CConfig,
    "reinforce": ReinforceConfig,
    "rloo": RLOOConfig,
    "grpo": GRPOConfig,
    "best_of_n": BestOfNConfig,
}


def options(name: str) -> type[Step3Config]:
    """The options of an algorithm, a name in step3_ppo/algorithms or the path of a Python file. Torch-free for those of
    this file.

    Raises: UserError for an unknown name, or a file whose Config is not a `Step3Config`.
    """
    config = BY_NAME.get(name) or plugins.find("step3_ppo.algorithms", name).Config
    if not (isinstance(config, type) and issubclass(config, Step3Config)):
        raise UserError(f"{name}: Config: got {config}, expected a class derived from step3_ppo.config.Step3Config")
    return config
