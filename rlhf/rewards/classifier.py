"""The score of one label of a text classifier of transformers: sentiment, toxicity, a topic.

For a reward model, which reads the policy's own token ids and gives one number, use `learned`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import StrictInt
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config import Config as Base
from rlhf.config import suggest
from rlhf.config.options import ModelPath
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.models.load import context_length, explain_load_errors, load_config, refuse_non_finite
from rlhf.models.traits import attention_options
from rlhf.rewards import Context, Source
from rlhf.text.tokenizer import auto_tokenizer
from rlhf.types import Samples, length_groups


class Config(Base):
    model: ModelPath
    """directory or hub id of a sequence classifier with its tokenizer"""
    label: StrictInt | str | None = None
    """number or name of the label whose score counts; optional if there is only one. YAML reads yes, no, on and off as
    truth: quote such a name, label='"yes"'"""
    output: Literal["log_odds", "logit"] = "log_odds"
    """log_odds: log(p / (1 - p)) of the label, 0 at even chances; logit: the number before the softmax"""
    with_prompt: bool = False
    """classify prompt and response, not the response alone; the prompt loses its first tokens if both are longer than
    the context"""


@dataclass(frozen=True, slots=True)
class Classifier:
    """A model, its tokenizer, and the path or hub id that the user named."""

    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def build(config: Config, context: Context) -> Source:
    """The label's log-odds (or logit) for each text, in the classifier's own tokens.

    With exclusive labels z_i - log(sum over j != i of exp z_j); with independent labels, or a single one, z_i itself.
    Raises: UserError for a model without a trained head, an unknown label, or, when scoring, a text longer than the
    context.
    """
    classifier = load(config.model, context)
    label = label_of(config, classifier.model.config)
    independent = classifier.model.config.problem_type == "multi_label_classification"

    def score(samples: Samples) -> Tensor:
        prompts = samples.prompts if config.with_prompt else [""] * len(samples.answers)
        logits = all_logits(classifier, list(zip(prompts, samples.answers, strict=True)), context)
        label_logits = logits[:, label]
        if config.output == "logit" or independent or logits.shape[1] == 1:
            return label_logits
        other_logits = torch.cat([logits[:, :label], logits[:, label + 1 :]], dim=1)
        return label_logits - other_logits.logsumexp(1)

    return score


def load(path: str, context: Context) -> Classifier:
    """The classifier at `path`, frozen: the head in fp32, the layers below it in the run's dtype.

    The whole model is loaded in fp32, because a head rounded to bf16 would stay rounded.
    Raises: UserError if it cannot be loaded, or weights are missing: an untrained head would score at random.
    """
    source = resolve(path)
    config = load_config(source)
    options = {"trust_remote_code": False, "weights_only": True, **attention_options(config)}
    with explain_load_errors(source):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, config=config, dtype=torch.float32, output_loading_info=True, **options
        )
        tokenizer = auto_tokenizer(source, truncation_side="left")
    if info["missing_keys"]:
        raise UserError(
            f"reward 'classifier': model '{path}' has no weights {', '.join(sorted(info['missing_keys'])[:3])}; "
            "expected a trained sequence classifier"
        )
    refuse_non_finite(model, path)
    _narrow_below_head(model, context.dtype)
    return Classifier(path, model.to(context.device).eval().requires_grad_(False), tokenizer)


def _narrow_below_head(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the base model to `dtype`; the head stays in fp32, and its inputs are converted to fp32.

    The head is everything beside the base model: one matrix (`score`), or several layers, as in RoBERTa.
    """
    model.base_model.to(dtype)
    for head in model.children():
        if head is not model.base_model:
            head.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))


def label_of(config: Config, model_config: Any) -> int:
    """The number of the label in the options. Raises: UserError that lists the labels."""
    names = _labels(model_config)
    choices = ", ".join(f"{number}={name}" for number, name in sorted(names.items()))
    if config.label is None and len(names) == 1:
        return 0
    if config.label in names:
        return int(config.label)
    for number, name in names.items():
        if name == config.label:
            return number
    similar = suggest(str(config.label), list(names.values()))
    label = "no label" if config.label is None else f"label {config.label!r}"
    raise UserError(f"reward 'classifier': got {label}, expected label=one of {choices} of '{config.model}'{similar}")


def _labels(model_config: Any) -> dict[int, str]:
    return {int(number): str(name) for number, name in model_config.id2label.items()}


@torch.no_grad()
def all_logits(classifier: Classifier, texts: list[tuple[str, str]], context: Context) -> Tensor:
    """Logits [B, labels], fp32, of B prompts (which may be empty) and responses."""
    tokenizer, model = classifier.tokenizer, classifier.model
    encoded = [_ids(classifier, prompt, response) for prompt, response in texts]
    result = torch.zeros(len(texts), len(_labels(model.config)), device=context.device)
    for index in length_groups(torch.tensor([len(ids) for ids in encoded]), _rows_at_once(classifier, context)):
        batch = tokenizer.pad(
            {"input_ids": [encoded[i] for i in index.tolist()]},
            padding=len(index) > 1,
            padding_side="right",
            return_tensors="pt",
        ).to(context.device)
        result[index] = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    return result


def _rows_at_once(classifier: Classifier, context: Context) -> int:
    """The micro-batch size; 1, without padding, if the model has no padding id: a decoder's head needs it to find the
    last token."""
    pad = classifier.tokenizer.pad_token_id
    has_padding = pad is not None and pad == getattr(classifier.model.config, "pad_token_id", None)
    return context.micro_batch_size if has_padding else 1


def _ids(classifier: Classifier, prompt: str, response: str) -> list[int]:
    """The ids of a prompt and its response, without the first ones of the prompt if there are too many. If there are
    none (an empty response, and a tokenizer that adds no ids): BOS, else EOS."""
    tokenizer = classifier.tokenizer
    start = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None][:1]
    ids: list[int] = tokenizer(prompt + response)["input_ids"] or start
    limit = min(context_length(classifier.model.config), tokenizer.model_max_length)
    if prompt and len(ids) > limit and len(tokenizer(response)["input_ids"]) <= limit:
        ids = tokenizer(prompt + response, truncation=True, max_length=limit)["input_ids"]
    if not 0 < len(ids) <= limit:
        raise UserError(
            f"reward 'classifier': {response[:60]!r} has {len(ids)} tokens, expected 1 to {limit}, the context of "
            f"'{classifier.path}'; lower --response-length"
        )
    return ids
