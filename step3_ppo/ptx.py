"""PPO-ptx of InstructGPT: a fine-tuning loss beside the policy loss, so that the policy forgets less."""

from collections.abc import Iterator
from itertools import count as forever

import torch
from torch import Tensor

from data.batches import Batches, sft_batch
from data.dataset import PromptDataset
from data.prepare.encode import Demonstration
from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.types import Sequences, length_groups, to_device
from step3_ppo.config import PtxOptions


class Ptx:
    """An endless stream of demonstrations or texts: one batch in every optimizer step of the actor.

        loss = policy loss + ptx_coef * mean over the batch's tokens of -log pi(token)

    arXiv 2203.02155, eq. 2, with a mean over tokens where the paper has one over texts.
    """

    def __init__(self, dataset: PromptDataset[Demonstration], options: PtxOptions, seed: int, pad_id: int) -> None:
        """seed: of the order of the rows."""
        self._dataset, self._options, self._pad_id = dataset, options, pad_id
        ranks = (collectives.dp_rank(), collectives.dp_size())
        self.batches = Batches(len(dataset), options.ptx_batch_size, seed, ranks)
        self._stream = self._endless()
        self._tokens: Tensor = torch.ones(())

    def _endless(self) -> Iterator[list[int]]:
        for epoch in forever(1):
            yield from self.batches.until_epoch(epoch)

    def micro_batches(self) -> list[Sequences]:
        """This rank's share of the next batch; the same number of micro-batches on every rank."""
        batch = sft_batch([self._dataset[i] for i in next(self._stream)], self._pad_id)
        self._tokens = collectives.sum_over_ranks(batch.loss_mask.sum())
        return [batch[rows].trimmed() for rows in length_groups(batch.lengths, self._options.micro_batch_size)]

    def loss(self, actor: Engine, micro: Sequences) -> losses.Loss:
        """The micro-batch's share of the weighted loss of the batch that `micro_batches` returned last. Metrics:
        ptx_nll, nats per token."""
        logprobs = actor(micro)[0]
        nll, _ = losses.token_nll(logprobs, to_device(micro.loss_mask, logprobs.device), self._tokens)
        return self._options.ptx_coef * nll, {"ptx_nll": nll.detach()}
