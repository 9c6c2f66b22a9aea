"""The stages of the chain: the only list of them, and their contract. Torch-free, except `load`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlhf.config.declaration import Declaration
from rlhf.training.stage_process import fast_imports
from step1_sft.config import STAGE as SFT
from step2_reward.config import STAGE as REWARD
from step3_ppo.config import STAGE as PPO

if TYPE_CHECKING:
    from rlhf.plan.forecast import Workload
    from rlhf.roles import FindTokenizer, LoadTokenizer, Planned, Role

C = TypeVar("C", contravariant=True)
STAGES: Mapping[int, Declaration] = {1: SFT, 2: REWARD, 3: PPO}
"""by step"""


class Stage(Protocol[C]):
    """The contract of a stage with the chain. `config`: the stage's options."""

    def named_roles(self, config: C, /) -> "Sequence[Role]":
        """Its models as the options name them, or as an earlier stage makes them. Reads no file."""

    def roles(self, config: C, planned: "Planned", find: "FindTokenizer", /) -> "Sequence[Role]":
        """Its models: the first is the one that it trains for later stages.

        planned: stages that run before this one, and the role that each trains
        Raises: UserError.
        """

    def content(self, config: C, /) -> Mapping[str, str]:
        """A digest of each local file or folder of its data."""

    def workload(self, table: "Sequence[Role]", config: C, device: str, /) -> "Workload":
        """The work for a plan, with the models of `roles`. device: cpu or cuda"""

    def check(self, config: C, planned: "Planned", ranks: int, load: "LoadTokenizer", /) -> object:
        """Check options, models and data before a model is loaded or anything is written.

        planned: as of `roles`
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
