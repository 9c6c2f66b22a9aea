"""A penalty for long responses, in the policy's tokens, EOS included."""

from pydantic import Field
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.rewards import Context, Source
from rlhf.types import Samples


class Config(Base):
    target: int = Field(ge=0)
    """number of tokens without a penalty"""
    penalty: float = Field(0.01, ge=0, allow_inf_nan=False)
    """penalty of each further token, without limit"""
    buffer: int | None = Field(None, ge=1)
    """instead of penalty: number of tokens after the target over which the score falls from 0 to its minimum -1, which
    a weight scales"""


def build(config: Config, context: Context) -> Source:
    """For a response of n tokens: -penalty * max(0, n - target), or with a buffer

        -min(1, max(0, n - target) / buffer)

    which is the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) with L_cache = buffer and
    L_max = target + buffer.
    """

    def score(samples: Samples) -> Tensor:
        beyond = (samples.rollout.lengths - config.target).clamp(min=0).to(context.device).float()
        return -config.penalty * beyond if config.buffer is None else -(beyond / config.buffer).clamp(max=1)

    return score
