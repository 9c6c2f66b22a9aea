"""The rollout of an iteration, of all ranks on every rank, so that its minibatches are those of one process.

Each rank samples and scores its own prompts. What an optimizer step learns from must not depend on how many ranks there
are, so the minibatches are drawn from the whole rollout, and each is then dealt to the ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.types import Credit, ScoredRollout, TensorRecord


@dataclass(frozen=True, slots=True)
class CreditedRollout(TensorRecord):
    """A rollout, or some rows of it, with the credit of its tokens."""

    rollout: ScoredRollout
    credit: Credit

    def trimmed(self) -> "CreditedRollout":
        """Without the columns that are padding in every row."""
        rollout = self.rollout.trimmed()
        return CreditedRollout(rollout, self.credit.cut(rollout.mask.shape[1]))

    def widened(self, prompt: int, response: int) -> "CreditedRollout":
        """With padding up to P = `prompt` on the left and T = `response` on the right."""
        return CreditedRollout(self.rollout.widened(prompt, response), self.credit.widened(response))


def gather(credited: CreditedRollout, indices: list[int], group: int) -> tuple[CreditedRollout, list[int]]:
    """The rollout of all ranks with its credit, and the indices of its prompts, in the order of one process.

    Prompts are dealt to the ranks one by one (`data.batches.Batches`); `group` neighbouring rows are the responses to
    one prompt. All ranks call this together.
    Raises: UserError, on every rank, if an algorithm has selected no rows, or not equally many on each.
    """
    shares, indices_of_ranks = zip(*collectives.gather_shares((credited, indices)), strict=True)
    counts = [len(share) for share in shares]
    if counts != [max(counts[0], 1)] * len(counts):
        raise UserError(
            f"select: the algorithm chose {', '.join(map(str, counts))} responses on ranks 0 to {len(counts) - 1}; "
            "expected as many on every rank, and at least one"
        )
    if len(shares) == 1:
        return credited, indices
    prompt = max(share.rollout.prompt_ids.shape[1] for share in shares)
    response = max(share.rollout.response_ids.shape[1] for share in shares)
    order = torch.arange(len(shares) * len(credited)).view(len(shares), -1, group).transpose(0, 1).flatten()
    joined = CreditedRollout.concatenated([share.widened(prompt, response) for share in shares])
    joined_indices = [index for indices in indices_of_ranks for index in indices]
    return joined[order], [joined_indices[i] for i in order.tolist()]


def deal(rows: Tensor, lengths: Tensor) -> Tensor:
    """This rank's rows of a minibatch: every rank gets equally many rows, and about as many tokens.

    rows [b] row numbers in the whole rollout, lengths [B] tokens of its rows.
    """
    return rows[lengths[rows].argsort(descending=True, stable=True)][
        collectives.data_rank() :: collectives.data_world_size()
    ]
