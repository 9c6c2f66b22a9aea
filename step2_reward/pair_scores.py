"""The scores of several reward models on the pairs of several sources, read as training reads them."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import pair_batch
from data.config import DataOptions
from data.dataset import PromptDataset, Recipe, open_datasets
from data.prepare.encode import Preference
from rlhf import console
from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.distributed import collectives
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.precision import compute_dtype
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.models.load import require_context
from rlhf.models.reading import Reading, compare, describe, reading_of
from rlhf.models.scalar import ScalarModel, load_scalar_model, score_separately
from rlhf.storage.manifests import resolve_model_path
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer, same_ids
from rlhf.types import length_groups
from step2_reward.evaluation_options import EvaluateRewardConfig


@dataclass(frozen=True, slots=True)
class SourceScores:
    """N pairs of one source, and one model's scores of them."""

    model: str
    data_path: str
    scores: Tensor
    """of the chosen and the rejected response, float64 [N, 2]"""
    lengths: Tensor
    """tokens of the two responses, long [N, 2]"""
    elements: Tensor
    """long [N]; the pairs of one ranked list have one number"""
    subsets: tuple[str, ...]
    """[N]; empty if the data have no column of that name"""
    dropped: Mapping[str, int]
    """reason -> rows that were left out"""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The pairs of one source in the ids of a tokenizer."""

    data_path: str
    dataset: PromptDataset[Preference]


def score_models(options: EvaluateRewardConfig) -> list[SourceScores]:
    """The scores of all models on all sources, model by model. One model at a time is in memory.

    Raises: UserError for a model or data that cannot be read, and for models whose tokenizers differ; NonFiniteError.
    """
    paths = {model: resolve(resolve_model_path(model, "model", "critic")) for model in options.models}
    tokenizer = _common_tokenizer(paths, options.chat_template)
    sources = [encode(path, options, tokenizer) for path in options.data_path]
    for path in paths.values():
        require_context(path, max(int(source.dataset.lengths.max()) for source in sources))
    dtype = compute_dtype(EngineOptions(dtype=options.dtype), collectives.local_device())
    scored = []
    for name, path in paths.items():
        console.status(f"scoring with {name}")
        engine = FrozenEngine(load_scalar_model(path, dtype, id_count(tokenizer)), FrozenOptions(zero_stage=0), dtype)
        with engine.inference() as model:
            template = Template(tokenizer)
            reading = reading_of(path, template)
            line = describe(name, reading, tokenizer)
            if line is not None:
                console.say(line + (compare(name, path, model, reading, template) if reading.foreign else ""))
            scored += [_score_source(name, Reader(model, reading, template), source, options) for source in sources]
        del engine, model
        gc.collect()  # before the next model is loaded: modules with hooks are reference cycles
    return scored


def _common_tokenizer(paths: Mapping[str, str], chat_template: str) -> PreTrainedTokenizerBase:
    tokenizers = {name: prepare_tokenizer(load_tokenizer(path), chat_template) for name, path in paths.items()}
    first, *others = tokenizers
    for other in others:
        if not same_ids(tokenizers[first], tokenizers[other]):
            raise UserError(
                f"reward models {first} and {other}: got different tokenizers or chat templates, expected one, because "
                "models are compared on the same tokens; evaluate each by itself"
            )
    return tokenizers[first]


def encode(data_path: str, options: EvaluateRewardConfig, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """All usable pairs of a source, by the reader of training. Raises: UserError."""
    same = ("chat_template", "max_prompt_length", "max_length", "truncate", "max_dropped", "skip_bad_rows")
    data = DataOptions(
        data_path=(data_path,),
        data_split=(0, 1, 0),
        eval_fraction=0.0,
        max_eval_rows=0,
        max_train_rows=options.max_rows,
        **{name: getattr(options, name) for name in (*same, "data_workers", "data_cache")},
    )
    dataset: PromptDataset[Preference] = open_datasets(data, Recipe("reward"), tokenizer).train
    return Encoded(data_path, dataset)


@dataclass(frozen=True, slots=True)
class Reader:
    """A reward model, and how it reads the pairs of its template."""

    model: ScalarModel
    reading: Reading
    template: Template

    def scores(self, pairs: Sequence[Preference], micro_batch_size: int) -> Tensor:
        """The scores of both sides, float64 [N, 2] on the CPU, with the model's ending in place of that of training."""
        if not pairs:
            return torch.zeros(0, 2, dtype=torch.float64)
        finished, pad_id = list(map(self._finished, pairs)), self.template.tokenizer.pad_token_id
        lengths = torch.tensor([max(len(pair.chosen), len(pair.rejected)) for pair in finished])
        groups = length_groups(lengths, micro_batch_size)
        batches = (pair_batch([finished[i] for i in rows], pad_id) for rows in groups)
        scores = torch.cat([score_separately(self.model, batch).scores for batch in batches])
        return scores.double().cpu()[torch.cat(groups).argsort()]

    def _finished(self, pair: Preference) -> Preference:
        chosen, rejected = (self._side(side) for side in (pair.chosen, pair.rejected))
        return replace(pair, chosen=chosen, rejected=rejected)

    def _side(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        ending = self.template.ending
        whole = ids[-len(ending) :] == ending and ending != self.reading.ending  # a response that was cut has none
        return (*self.reading.finished(ids, len(ending)),) if whole else ids


def _score_source(name: str, reader: Reader, source: Encoded, options: EvaluateRewardConfig) -> SourceScores:
    items = source.dataset[:]
    scores = reader.scores(items, options.micro_batch_size)
    nonfinite = int((~scores.isfinite()).any(1).sum())
    if nonfinite:
        raise NonFiniteError(
            f"reward model '{name}': scores of {nonfinite} of {len(scores)} pairs of {source.data_path} are not finite"
        )
    elements = source.dataset.elements
    return SourceScores(
        model=name,
        data_path=source.data_path,
        scores=scores,
        lengths=torch.tensor([[len(side) - x.prompt_length for side in (x.chosen, x.rejected)] for x in items]),
        elements=torch.arange(len(items)) if elements is None else torch.from_numpy(elements.copy()),
        subsets=tuple(item.subset for item in items) if any(item.subset for item in items) else (),
        dropped=source.dataset.dropped,
    )
