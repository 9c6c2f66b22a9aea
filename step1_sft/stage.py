"""Supervised fine-tuning: maximise the log-probability of the responses (InstructGPT, arXiv 2203.02155).

loss = -1/N sum log pi(y_t | x, y_<t), over the N response tokens of a batch
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, counted_rows, padding_share, sft_batch
from data.dataset import PhaseData, PromptDataset, Recipe
from data.prepare.encode import Demonstration
from data.prepare.pack import CROSS_TEXT_ATTENTION
from rlhf import adapters, console
from rlhf.distributed import collectives
from rlhf.engine.export import save_policy, saved_adapter
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.precision import compute_dtype
from rlhf.engine.training import Engine, shards_of
from rlhf.maths import losses
from rlhf.models import new_rows, sequence_parallel
from rlhf.models.load import Loading, load_causal_lm, set_dropout
from rlhf.models.packing import packs_rows
from rlhf.models.policy import Policy
from rlhf.plan.activations import PassShape
from rlhf.roles import Part, tokenizer_of
from rlhf.storage import manifests
from rlhf.supervised.demonstrations import perplexity
from rlhf.supervised.runner import FOLDERS, Supervised
from rlhf.text.encoder import id_count
from rlhf.types import Metrics, WeightedSequences, length_groups, to_device
from step1_sft import vocabulary
from step1_sft.config import STAGE, SFTConfig

POLICY = Part("policy", "model", FOLDERS, "lm")
MEASURED = 200
"""training rows on which tokens are counted"""


def train(
    policy: Engine[Policy], dataset: PromptDataset[Demonstration], batches: Batches, config: SFTConfig, pad_id: int
) -> Iterator[Metrics]:
    """The algorithm: one optimizer step on the mean token loss of each batch, in which a token has its row's weight."""
    for indices in batches.until_epoch(config.num_train_epochs):
        batch = sft_batch([dataset[i] for i in indices], pad_id)
        counted = torch.from_numpy(counted_rows(indices))[:, None]
        batch = replace(batch, loss_mask=batch.loss_mask & counted)
        weights = batch.weight[:, None].double() * batch.loss_mask
        sums = torch.stack([weights.sum(), batch.loss_mask.sum(), (batch.mask & counted).sum()])
        count, learned, tokens = collectives.sum_over_ranks(sums)
        groups = length_groups(batch.lengths, config.micro_batch_size)
        micros = [batch[rows].trimmed() for rows in groups]

        def loss(micro: WeightedSequences, count: Tensor = count) -> losses.Loss:
            logprobs = policy(micro).logprobs
            mask, weight = (to_device(x, logprobs.device) for x in (micro.loss_mask, micro.weight))
            return losses.token_nll(logprobs, mask, count, weight)

        metrics = policy.step(micros, loss, [[indices[i] for i in rows] for rows in groups])
        numbers = {"tokens": tokens.item(), "tokens_learned": learned.item()}
        yield {**metrics, **numbers, "padding": padding_share(micros, partial(packs_rows, policy.module.lm))}


def recipe(config: SFTConfig) -> Recipe:
    """The rows to learn: prompts with responses, or plain text."""
    return Recipe("sft", config.loss_on, config.objective)


def shape(config: SFTConfig) -> PassShape:
    """Rows of `max_length` tokens. Every token but the first may count in the loss."""
    return PassShape(config.micro_batch_size, config.max_length, config.max_length - 1)


def files(config: SFTConfig) -> dict[str, str]:
    """Digests of the files with new tokens."""
    paths = [path for path in (config.add_tokens, config.extend_tokenizer) if path is not None]
    own = [Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path) for path in paths]
    return {str(path): str(manifests.digest(path)["sha256"]) for path in own if path.is_file()}


def new_vocabulary(
    config: SFTConfig, model_path: str, tokenizer: PreTrainedTokenizerBase, data: PhaseData[Demonstration]
) -> vocabulary.Pieces:
    """The new ids with the pieces that their texts had before; reports what they save."""
    if config.add_tokens is None and config.extend_tokenizer is None:
        return {}
    before = tokenizer_of(model_path)
    pieces = vocabulary.pieces(before, vocabulary.extended_tokenizer(config, before))
    rows = [list(data.train[i].ids) for i in range(min(len(data.train), MEASURED))]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    old, new = vocabulary.tokens_per_character(before, tokenizer, texts)
    console.say(f"{len(pieces)} new tokens: {old:.3f} tokens a character before, {new:.3f} now ({len(rows)} rows)")
    return pieces


class FineTuning:
    """The policy in training (rlhf.supervised.runner.ModelInTraining)."""

    role: str = "policy"
    shown: tuple[str, ...] = ("loss", "grad_norm", "tokens_per_second")
    rising: tuple[str, ...] = ()

    def __init__(
        self,
        config: SFTConfig,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        data: PhaseData[Demonstration],
        total_steps: int,
    ) -> None:
        self._config, self._tokenizer, self._data, self._model_path = config, tokenizer, data, model_path
        dtype = compute_dtype(config, collectives.local_device())
        new_tokens = new_vocabulary(config, model_path, tokenizer, data)
        loading = Loading(config.seed, shards_of(config), config.quantize, new_tokens)
        lm = load_causal_lm(model_path, dtype, id_count(tokenizer), loading)
        if config.dropout:
            set_dropout(lm, config.dropout, model_path)
        adapters.wrap(lm, config.adapter)
        if config.adapter is not None and new_tokens:
            new_rows.train(lm, new_tokens)
        model = sequence_parallel.policy(lm, config.sequence_parallel_size)
        self.engine: Engine = Engine(model, config, total_steps)
        if config.objective == "text":
            console.say(f"{STAGE.name}: {CROSS_TEXT_ATTENTION}")
        self.before = self.evaluate()
        if math.isinf(self.before["eval_perplexity"]):
            raise NonFiniteError(
                f"model '{model_path}': its loss on held-out rows is not finite before training; expected a working "
                "model: "
                "use another model"
            )

    def train(self, batches: Batches) -> Iterator[Metrics]:
        return train(self.engine, self._data.train, batches, self._config, self._tokenizer.pad_token_id)

    def evaluate(self) -> Metrics:
        pad_id = self._tokenizer.pad_token_id
        return {"eval_perplexity": perplexity(self.engine, self._data.evaluation, self._config.eval_rows, pad_id)}

    def require_converged(self, metrics: Metrics) -> None:
        """Raises: NonFiniteError if the perplexity is higher than before training and higher than the vocabulary size,
        which is the perplexity of guessing."""
        before, after = metrics["eval_perplexity_before"], metrics["eval_perplexity"]
        vocabulary = len(self._tokenizer)
        if math.isinf(after) or after > max(before, vocabulary):
            raise NonFiniteError(
                f"the run has diverged: eval_perplexity was {before:.4g} before training and is {after:.4g} now; "
                "guessing "
                f"among {vocabulary} tokens gives {vocabulary}; nothing was exported; lower --learning-rate "
                f"(now {self._config.learning_rate:g}) and add --overwrite"
            )

    def save(self, folder: Path, metrics: Metrics | None = None) -> None:
        save_policy(self.engine, saved_adapter(self._config, self._model_path), self._tokenizer, folder)


FINE_TUNING = Supervised(
    STAGE,
    POLICY,
    shape,
    recipe,
    FineTuning,
    tokenizer=vocabulary.extended_tokenizer,
    added_ids=vocabulary.added_ids,
    files=files,
)
