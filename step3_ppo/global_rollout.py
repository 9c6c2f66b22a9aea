"""The rollout of an iteration, of all ranks on every rank, so that its minibatches are those of one process.

Each rank samples and scores its own prompts. What an optimizer step learns from must not depend on how many ranks there
are, so the minibatches are drawn from the whole rollout, and each is then dealt out to the ranks.
"""

import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.types import Credit, Rollout

Part = tuple[Rollout, Credit]


def of_all_ranks(scored: Part, numbers: list[int], group: int) -> tuple[Part, list[int]]:
    """Rollout and credit of all ranks, and their prompts' numbers in the data, in the order of one process.

    Prompts are dealt to the ranks one by one (`data.batches.Batches`); `group` neighbouring rows are the responses to
    one prompt. Every rank brings equally many rows and calls this together.
    """
    if collectives.data_world_size() == 1:
        return scored, numbers
    device = scored[0].mask.device
    rollouts, credits, shares = zip(
        *collectives.gather_shares((*(part.to("cpu") for part in scored), numbers)), strict=True
    )
    prompt = max(rollout.prompt_ids.shape[1] for rollout in rollouts)
    response = max(rollout.response_ids.shape[1] for rollout in rollouts)
    order = torch.arange(len(rollouts) * len(scored[0])).view(len(rollouts), -1, group).transpose(0, 1).flatten()
    rollout = Rollout.concatenated([part.widened(prompt, response) for part in rollouts])[order].to(device)
    credit = Credit.concatenated([part.widened(response) for part in credits])[order].to(device)
    joined = [number for share in shares for number in share]
    return (rollout, credit), [joined[i] for i in order.tolist()]


def dealt(rows: Tensor, lengths: Tensor) -> Tensor:
    """This rank's rows of a minibatch: every rank gets equally many, and as many long ones as the others.

    rows [b] row numbers of the whole rollout, lengths [B] tokens of its rows.
    """
    return rows[lengths[rows].argsort(descending=True, stable=True)][
        collectives.data_rank() :: collectives.data_world_size()
    ]
