"""The stages of the chain: the only list of them, and their contract. Torch-free, except `load`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlhf.config.declaration import Declaration
from rlhf.training.stage_process import fast_imports
from step1_sft.config import STAGE as SFT
from step2_reward.config import STAGE as REWARD
from step3_ppo.config import STAGE as PPO

if TYPE_CHECKING:
    from rlhf.plan.forecast import Workload

C = TypeVar("C", contravariant=True)
STAGES: Mapping[int, Declaration] = {1: SFT, 2: REWARD, 3: PPO}
"""by step"""


class Stage(Protocol[C]):
    """The contract of a stage with the chain. `config`: the stage's options."""

    def inputs(self, config: C, /) -> Mapping[str, str]:
        """Models that the stage starts from: directories, hub ids or short names, by option."""

    def content(self, config: C, /) -> Mapping[str, str]:
        """A digest of each local file or folder of its data."""

    def workload(self, config: C, device: str, model_paths: Mapping[str, str], /) -> "Workload":
        """The workload for a plan. device: cpu or cuda. model_paths: paths of the models of earlier stages, by
        option."""

    def check(self, config: C, planned: Mapping[str, str], ranks: int, /) -> object:
        """Check options, models and data before a model is loaded or anything is written.

        planned: stages that run before this one, and the model that each starts from
        Raises: UserError.
        """


def load(step: int) -> Stage[Any]:
    """The stage of a step. Its modules are imported here because they import torch."""
    with fast_imports():
        if step == 1:
            from step1_sft.stage import FINE_TUNING

            return FINE_TUNING
        if step == 2:
            from step2_reward.stage import REWARD_MODELLING

            return REWARD_MODELLING
        from step3_ppo.stage import REINFORCEMENT

        return REINFORCEMENT
