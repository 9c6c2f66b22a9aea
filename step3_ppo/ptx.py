"""PPO-ptx of InstructGPT: a fine-tuning loss beside the policy loss, so that the policy forgets less."""

from collections.abc import Iterator
from itertools import count as forever

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, sft_batch
from data.dataset import PromptDataset, Recipe, fingerprints, open_datasets
from data.prepare.encode import Demonstration
from data.prepare.mixture import open_origin, origins_of_other_phases
from data.prepare.pack import CROSS_TEXT_ATTENTION
from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.types import WeightedSequences, length_groups, to_device
from step3_ppo.config import PtxOptions, Step3Config


class Ptx:
    """An endless stream of demonstrations or texts: one batch in every optimizer step of the actor.

        loss = policy loss + ptx_coef * mean over the batch's tokens of -log pi(token)

    arXiv 2203.02155, eq. 2, with a mean over tokens where the paper has one over texts; a token has its row's weight.
    """

    def __init__(self, dataset: PromptDataset[Demonstration], options: PtxOptions, seed: int, pad_id: int) -> None:
        """seed: of the order of the rows."""
        self._dataset, self._options, self._pad_id = dataset, options, pad_id
        ranks = (collectives.dp_rank(), collectives.dp_size())
        self.batches = Batches(len(dataset), options.ptx_batch_size, seed, ranks)
        self._stream = self._endless()
        self._count: Tensor = torch.ones(())

    def _endless(self) -> Iterator[list[int]]:
        for epoch in forever(1):
            yield from self.batches.until_epoch(epoch)

    def micro_batches(self) -> list[WeightedSequences]:
        """This rank's share of the next batch; the same number of micro-batches on every rank."""
        batch = sft_batch([self._dataset[i] for i in next(self._stream)], self._pad_id)
        self._count = collectives.sum_over_ranks((batch.weight[:, None].double() * batch.loss_mask).sum())
        return [batch[rows].trimmed() for rows in length_groups(batch.lengths, self._options.micro_batch_size)]

    def loss(self, actor: Engine, micro: WeightedSequences) -> losses.Loss:
        """The micro-batch's share of the weighted loss of the batch that `micro_batches` returned last. Metrics:
        ptx_nll, nats per token."""
        logprobs = actor(micro).logprobs
        mask, weight = (to_device(x, logprobs.device) for x in (micro.loss_mask, micro.weight))
        nll, _ = losses.token_nll(logprobs, mask, self._count, weight)
        return self._options.ptx_coef * nll, {"ptx_nll": nll.detach()}


def open_ptx(config: Step3Config, tokenizer: PreTrainedTokenizerBase) -> PromptDataset[Demonstration] | None:
    """The rows of the fine-tuning loss (PPO-ptx); None without it."""
    if config.ptx_coef == 0:
        return None
    recipe = Recipe("sft", objective=config.ptx_objective, own_data_only=bool(config.ptx_data_path))
    return open_datasets(ptx_options(config), recipe, tokenizer).train


def ptx_options(config: Step3Config) -> Step3Config:
    """The options under which the rows of `open_ptx` are read: those of fine-tuning, or the paths of --ptx-data-path.

    The latter are paths for fine-tuning only. So a prompt that is held out, or that the reward model or PPO has, is not
    learned from them.
    Raises: UserError for a stream: it has no end, and all rows of such a path are learned.
    """
    if not config.ptx_data_path:
        return config
    for path in config.ptx_data_path:
        if open_origin(path).streaming:
            raise UserError(
                f"--ptx-data-path {path}: got a stream, expected data with an end; "
                "remove streaming=true, or name a file with the rows to learn"
            )
    limits = {"max_train_rows": None, "max_eval_rows": 0}
    return config.model_copy(update={"sft_only_data_path": config.ptx_data_path, **limits})


def describe_ptx(config: Step3Config, rows: PromptDataset[Demonstration]) -> str:
    """How many rows `open_ptx` returned, how many were skipped and why, and which streams were not searched."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in rows.dropped.items())
    other_origins = origins_of_other_phases(config, "sft", own_data_only=True) if config.ptx_data_path else []
    streams = ", ".join(dict.fromkeys(origin.data_path for _, origin in other_origins if origin.streaming))
    return (
        f"ptx: {len(rows)} rows to learn beside the reward"
        + (f"; skipped {dropped}" if dropped else "")
        + (f"; {CROSS_TEXT_ATTENTION}" if config.ptx_objective == "text" else "")
        + (f"; warning: {streams}: streams are not searched for prompts that both have" if streams else "")
    )


def ptx_content(config: Step3Config) -> dict[str, str]:
    """A digest of each local path that `open_ptx` reads."""
    if config.ptx_coef == 0:
        return {}
    own_data_only = bool(config.ptx_data_path)
    digests = fingerprints(ptx_options(config), "sft", own_data_only)
    return {f"{path} (ptx)": digest for path, digest in digests.items()}
