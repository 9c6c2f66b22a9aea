"""Held-out demonstrations: how well a policy predicts them, in the stage that learns from them and in later ones."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import sft_batch
from data.config import recorded_options
from data.dataset import PromptDataset, open_datasets
from data.prepare.encode import Demonstration, Recipe
from rlhf import console
from rlhf.distributed import collectives
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.models.policy import Policy
from rlhf.storage import disk, manifests
from rlhf.types import length_groups


def perplexity(policy: Engine[Policy], dataset: PromptDataset[Demonstration], eval_rows: int, pad_id: int) -> float:
    """exp of the mean loss over the response tokens of `dataset` on all ranks; every token has the same weight.

    eval_rows: in one pass. Infinite if it is too large for a float.
    """
    of_rank = collectives.rows_of_rank(len(dataset))
    nll, tokens = torch.zeros((), dtype=torch.float64, device=policy.device), torch.zeros((), dtype=torch.float64)
    with policy.inference() as model:
        for rows in length_groups(torch.tensor(dataset.lengths[of_rank]), eval_rows):
            batch = sft_batch([dataset[of_rank[i]] for i in rows], pad_id)
            nll -= model(batch).logprobs.sum().double()
            tokens += batch.loss_mask.sum()
    total, count = collectives.sum_over_ranks(torch.stack([nll.cpu(), tokens])).tolist()
    mean = total / count
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def logprob_sums(
    policy: Engine[Policy] | FrozenEngine[Policy], rows: Sequence[Demonstration], eval_rows: int, pad_id: int
) -> Tensor:
    """The log-probability of the learned tokens of each row, float64 [N]. eval_rows: in one pass."""
    of_rank = collectives.rows_of_rank(len(rows))
    groups = length_groups(torch.tensor([len(rows[i].ids) for i in of_rank]), eval_rows)
    with policy.inference() as model:
        batches = (sft_batch([rows[of_rank[i]] for i in group], pad_id) for group in groups)
        sums = torch.cat([model(batch).logprobs.double().sum(1).cpu() for batch in batches])
    return torch.tensor(collectives.of_all_ranks(sums[torch.cat(groups).argsort()].tolist()), dtype=torch.float64)


def held_out(stage: Path, tokenizer: PreTrainedTokenizerBase) -> PromptDataset[Demonstration] | None:
    """The rows that a finished stage of fine-tuning held out, in the ids of `tokenizer`. None without such a stage, and
    if its data are gone, which a note says."""
    if not (stage / manifests.MANIFEST).is_file():
        return None
    config = disk.read_json(stage / manifests.MANIFEST).get("config", {})
    if "loss_on" not in config:
        return None
    recipe = Recipe("sft", config["loss_on"], config["objective"])
    try:
        return open_datasets(recorded_options(config), recipe, tokenizer).evaluation
    except UserError as error:
        console.say(f"note: the perplexity of the demonstrations of {stage} is not measured: {error}")
        return None
