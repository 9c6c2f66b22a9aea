"""Export of an engine's model to a Hugging Face directory that transformers or peft can load."""

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf import adapters, console
from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.distributed.tensor_parallel import gather_full
from rlhf.distributed.zero3 import gather_weights, is_sharded
from rlhf.engine import old_readers
from rlhf.engine.ema import WeightsCopy
from rlhf.engine.training import Engine
from rlhf.models import adapter_files, new_rows, quantized, traits
from rlhf.models.ends import saved_ends
from rlhf.models.policy import ActorCritic, Policy
from rlhf.models.scalar import HEAD, ScalarModel, ScoreStatistics
from rlhf.models.trunk import Role
from rlhf.storage import disk


@dataclass(frozen=True, slots=True)
class AdapterAlone:
    """Write the adapter of a model without the weights of its base model, as a directory that peft can load."""

    base: str
    """path or hub id of the model without the adapter"""


SavedAdapter = str | AdapterAlone | None
"""the adapter of a model that is saved: its method, to be merged into the weights; or alone; None: it has none"""


def saved_adapter(options: EngineOptions, model: str) -> SavedAdapter:
    """How a trained model is saved under these options. model: the path from which it started"""
    alone = options.share_trunk or adapters.virtual_tokens(options.adapter)
    return AdapterAlone(adapter_files.base_of(model)) if alone else options.adapter


def save_policy(
    engine: Engine,
    adapter: SavedAdapter,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    weights: WeightsCopy | None = None,
) -> None:
    """Write the language model of a Policy engine, with tokenizer, template and generation config.

    weights: an average or the best ones, to be written in place of the engine's last weights
    """
    policy = engine.module
    assert isinstance(policy, Policy)
    with weights.inside(policy) if weights is not None else contextlib.nullcontext():
        state = None if isinstance(adapter, AdapterAlone) else full_state(policy.lm, adapter)
        if collectives.is_main():  # the state may be the model's own memory
            set_special_ids(policy.lm, tokenizer)
            if isinstance(adapter, AdapterAlone):
                policy.lm.config.save_pretrained(directory)
                policy.lm.generation_config.save_pretrained(directory)
                adapter_files.save(*_adapted(policy, policy.lm), adapter.base, directory)
            else:
                assert state is not None
                _untie_changed(policy.lm, state)
                policy.lm.save_pretrained(directory, state_dict=state)
            save_left_padded(tokenizer, directory)
    collectives.barrier()


def _adapted(model: object, whole: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """The model that has the adapter of an engine's model, and the adapter's name."""
    return (model.trunk.lm, model.role) if isinstance(model, Role) else (whole, adapter_files.ONLY)


def _untie_changed(lm: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """A head that differs from the embedding, since an adapter has changed one of them, is not tied any more: a loader
    that ties them by the config would lose one."""
    tied = lm._tied_weights_keys if isinstance(lm._tied_weights_keys, dict) else {}
    pairs = [(state.get(head), state.get(own)) for head, own in tied.items()]
    if any(head is not None and own is not None and not torch.equal(head, own) for head, own in pairs):
        lm.config.tie_word_embeddings = False


def set_special_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the ids of the ends and of padding in the config and the generation config of a policy that is saved."""
    ends = saved_ends(lm, tokenizer.eos_token_id)
    try:
        lm.generation_config.validate(strict=True)
    except ValueError:  # contradictory sampling settings would make save_pretrained fail
        lm.generation_config = GenerationConfig(bos_token_id=lm.config.bos_token_id)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = ends
    lm.config.pad_token_id = lm.generation_config.pad_token_id = tokenizer.pad_token_id


def save_left_padded(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the tokenizer of a policy, whose config is there: generation continues the last column of a batch of
    prompts."""
    own_tokenizer = copy.deepcopy(tokenizer)
    own_tokenizer.padding_side = own_tokenizer.init_kwargs["padding_side"] = "left"  # saved if both have it
    own_tokenizer.save_pretrained(directory)
    old_readers.add_entries(directory)


def save_scalar(
    engine: Engine,
    adapter: SavedAdapter,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    scores: ScoreStatistics | None = None,
) -> None:
    """Write a ScalarModel engine, or the critic of an ActorCritic, in the form that
    `AutoModelForSequenceClassification(num_labels=1)` reads.

    The head is fp32 in the file, whatever the other weights are. Its pad token is not EOS, because that class pools at
    the last token that is not padding. `scores` is written to its config.
    """
    model = engine.module.critic() if isinstance(engine.module, ActorCritic) else engine.module
    assert isinstance(model, ScalarModel)
    with gather_weights([model.score.weight]):
        head = model.score.exact.detach().to("cpu")
    if isinstance(adapter, AdapterAlone):
        if collectives.is_main():
            save_scalar_config(model, tokenizer, directory, scores)
            adapter_files.save(*_adapted(engine.module, model.backbone), adapter.base, directory, head)
    else:
        prefix = model.backbone.base_model_prefix
        state = {f"{prefix}.{name}": value for name, value in full_state(model.backbone, adapter).items()}
        if collectives.is_main():
            state[HEAD] = head
            save_scalar_config(model, tokenizer, directory, scores)
            contiguous = {name: weight.contiguous() for name, weight in state.items()}
            disk.save_tensors(contiguous, directory / "model.safetensors", {"format": "pt"})
    collectives.barrier()


def save_scalar_config(
    model: ScalarModel, tokenizer: PreTrainedTokenizerBase, directory: Path, scores: ScoreStatistics | None
) -> None:
    """Write the config and the tokenizer of a scalar model."""
    config = copy.deepcopy(model.backbone.config)  # an actor may have the same one
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    config.eos_token_id = saved_ends(model.backbone, tokenizer.eos_token_id)
    classifier = traits.class_of(AutoModelForSequenceClassification, config)
    if classifier is not None:
        config.architectures = [classifier.__name__]
    config.dtype = model.score.weight.dtype
    config.score_mean, config.score_std = (None, None) if scores is None else (scores.mean, scores.std)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    old_readers.add_entries(directory)


def full_state(model: PreTrainedModel, adapter: str | None) -> dict[str, Tensor]:
    """Weights by their transformers names on the CPU of rank 0, adapters merged; tied weights stay one tensor.

    Every rank calls this, and the others get an empty dict. A sharded model is gathered one weight at a time; quantised
    weights are dequantised, a layer at a time.
    """
    layers = quantized.quantized_layers(model)
    if not layers:
        return _state(model, adapter)
    if not collectives.is_main():  # a quantised model is whole on every rank
        return {}
    console.say(f"the quantised weights are dequantised to {str(model.dtype)[6:]} to merge the adapter into them")
    with quantized.dequantized(model) as transposed:
        state = _state(model, adapter)
    stored_transposed = {f"{name.replace('.base_layer', '')}.weight" for name in transposed}
    return {name: value.T if name in stored_transposed else value for name, value in state.items()}


def _state(model: PreTrainedModel, adapter: str | None) -> dict[str, Tensor]:
    copies: dict[int, Tensor] = {}
    state = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        with gather_weights([weight]):
            value = gather_full(weight, weight.detach())
            if collectives.is_main():
                if id(weight) not in copies:
                    copies[id(weight)] = value.to("cpu", copy=is_sharded(weight))
                state[name] = copies[id(weight)]
    return merged(model, state, adapter)


def merged(model: PreTrainedModel, state: dict[str, Tensor], adapter: str | None) -> dict[str, Tensor]:
    """`state`, the weights of the model, with its adapter merged (None: it has no adapter)."""
    if adapter is None:
        return state
    state = new_rows.fold(model, state)
    return adapters.open_adapter(adapter).merged(model, state)
