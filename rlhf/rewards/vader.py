"""The sentiment of a response by VADER's lexicon and rules (Hutto & Gilbert 2014), in [-1, 1]."""

import torch
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.errors import UserError
from rlhf.rewards import Context, Source
from rlhf.types import Samples


class Config(Base):
    with_prompt: bool = False
    """score the prompt and the response, not the response alone"""


def build(config: Config, context: Context) -> Source:
    """VADER's compound score; needs the vaderSentiment package."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError:
        raise UserError("reward 'vader': vaderSentiment is not installed; pip install vaderSentiment") from None
    analyzer = SentimentIntensityAnalyzer()

    def score(samples: Samples) -> Tensor:
        texts = [p + r if config.with_prompt else r for p, r in zip(samples.prompts, samples.answers, strict=True)]
        return torch.tensor([analyzer.polarity_scores(text)["compound"] for text in texts], device=context.device)

    return score
