"""A penalty for a response without EOS: `missing_eos_penalty` as a score source."""

from pydantic import Field
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.rewards import Context, Source
from rlhf.types import Samples


class Config(Base):
    penalty: float = Field(1.0, ge=0, allow_inf_nan=False)
    """penalty of a response without EOS"""


def build(config: Config, context: Context) -> Source:
    """-penalty for a response that was cut, 0 for one that ended with EOS."""

    def score(samples: Samples) -> Tensor:
        return -config.penalty * (~samples.rollout.ended).to(context.device).float()

    return score
