"""Scores are scaled by the running statistics of the run, then clipped, before an algorithm sees them."""

from typing import Any

import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.maths import ops
from step3_ppo.config import ScoreOptions


class ScoreScaling:
    """Scores divided by the running standard deviation of all scores of the run, optionally centred on their mean.

        score' = clip((score [- mean]) / std, -score_clip, score_clip)

    mean, std (biased) over the responses of all ranks and iterations so far, this one's included. TRL's
    use_score_scaling, use_score_norm and score_clip; Engstrom et al. 2020 (arXiv 2005.12729) on why.
    """

    def __init__(self, options: ScoreOptions) -> None:
        self._options = options
        self._moments = torch.zeros(3, dtype=torch.float64)

    def __call__(self, scores: Tensor) -> Tensor:
        """The scores [B] for the algorithm; updates the running statistics. All ranks call this together."""
        c = self._options
        if c.use_score_scaling:
            mask = torch.ones_like(scores, dtype=torch.bool)
            self._moments += collectives.sum_over_ranks(ops.moments(scores, mask)).cpu()
            mean, var = ops.mean_var(self._moments)
            if var > 0:  # otherwise all scores so far are equal, and there is nothing to divide by
                scores = ((scores.double() - (mean if c.use_score_norm else 0.0)) / var.sqrt()).to(scores.dtype)
        return scores if c.score_clip is None else scores.clamp(-c.score_clip, c.score_clip)

    def state_dict(self) -> dict[str, Any]:
        """Number, sum and sum of squares of the scores so far."""
        return {"moments": self._moments.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = torch.tensor(state["moments"], dtype=torch.float64)
