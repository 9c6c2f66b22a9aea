"""The stages of the chain: the only list of them, and what the chain asks of each. Torch-free, but for `load`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.config.declaration import Declaration
from step1_sft.config import STAGE as SFT
from step2_reward.config import STAGE as REWARD
from step3_ppo.config import STAGE as PPO

if TYPE_CHECKING:
    from rlhf.plan.stage import Workload

STAGES: Mapping[int, Declaration] = {1: SFT, 2: REWARD, 3: PPO}
"""by step"""


class Stage(Protocol):
    """A stage as the chain sees it. `config`: the stage's options."""

    def inputs(self, config: Any, /) -> Mapping[str, str]:
        """The models that it starts from: directories, hub ids or short names, by the option that names them."""

    def content(self, config: Any, /) -> Mapping[str, str]:
        """A digest of each local file or folder of its data."""

    def workload(self, config: Any, device: str, model_paths: dict[str, str], /) -> "Workload":
        """The work that a plan counts. device: its kind. model_paths: models that earlier stages make for this one."""

    def check(self, config: Any, planned: Mapping[str, str], ranks: int, /) -> object:
        """Raises: UserError for what cannot work, before a model is loaded or anything written. planned: the stages
        that will have run by then, and the model that each starts from."""


def load(step: int) -> Stage:
    """The stage that is this step. Its modules import torch, so they are imported here."""
    if step == 1:
        from step1_sft.stage import FINE_TUNING

        return FINE_TUNING
    if step == 2:
        from step2_reward.stage import REWARD_MODELLING

        return REWARD_MODELLING
    from step3_ppo.stage import REINFORCEMENT

    return REINFORCEMENT
