"""Ratings by attribute in standard units, so that attributes of any scale weigh the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.build.encode import Preference
from rlhf.errors import UserError


@dataclass(frozen=True, slots=True)
class RatingScale:
    """Mean and standard deviation of the ratings of both sides of all training pairs, by attribute. Both [K]."""

    mean: Tensor
    std: Tensor

    def __call__(self, ratings: Tensor) -> Tensor:
        """Ratings [..., K] less the mean, in standard deviations."""
        return (ratings - self.mean) / self.std


def rating_scale(pairs: Sequence[Preference], attributes: Sequence[str]) -> RatingScale:
    """The scale of each attribute.

    Raises: UserError if no pair has an attribute, or all have the same rating.
    """
    by_attribute: dict[str, list[float]] = {}
    for pair in pairs:
        for name, *both in pair.ratings:
            by_attribute.setdefault(name, []).extend(both)
    for name in attributes:
        if name not in by_attribute:
            names = ", ".join(sorted(by_attribute)) or "no ratings at all"
            raise UserError(
                f"--attributes {name}: no training pair has this rating, got {names}; expected a column "
                f'attribute_ratings such as {{"{name}": [4, 1]}}, of the chosen and of the rejected response'
            )
    ratings = [torch.tensor(by_attribute[name], dtype=torch.float64) for name in attributes]
    mean = torch.stack([each.mean() for each in ratings])
    std = torch.stack([each.std(correction=0) for each in ratings])
    for name, each in zip(attributes, std.tolist(), strict=True):
        if each == 0:
            raise UserError(
                f"--attributes {name}: all ratings are {by_attribute[name][0]:g}, expected different ones; remove it"
            )
    return RatingScale(mean.float(), std.float())
