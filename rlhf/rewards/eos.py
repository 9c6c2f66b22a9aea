"""A penalty for a response that was cut before its end: `missing_eos_penalty` as a source with a name."""

from pydantic import Field
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.rewards import Context, Source
from rlhf.types import Samples


class Config(Base):
    penalty: float = Field(1.0, ge=0, allow_inf_nan=False)
    """taken for a response without EOS"""


def build(config: Config, context: Context) -> Source:
    """-penalty where the response was cut, 0 where it closed with EOS."""

    def score(samples: Samples) -> Tensor:
        return -config.penalty * (~samples.rollout.ended).to(context.device).float()

    return score
