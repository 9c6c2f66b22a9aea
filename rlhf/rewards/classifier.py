"""What a text classifier of transformers says of one label: sentiment, toxicity, a topic.

For a reward model, which reads the policy's own sequence and gives one number, there is `learned`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config import Config as Base
from rlhf.config import suggest
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.models.load import context_length, load_config, readable, refuse_non_finite
from rlhf.rewards import Context, Source
from rlhf.types import Samples, length_groups


class Config(Base):
    model: str
    """directory or hub id of a sequence classifier with its tokenizer"""
    label: int | str | None = None
    """number or name of the label that is wanted; may be left out where there is one"""
    output: Literal["log_odds", "logit"] = "log_odds"
    """log_odds: log(p / (1 - p)) of the label, 0 at even chances; logit: the number before the softmax"""
    with_prompt: bool = False
    """judge the prompt's text too, not the response alone"""


@dataclass(frozen=True, slots=True)
class Classifier:
    """A model and its tokenizer, and where they are from."""

    place: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def build(config: Config, context: Context) -> Source:
    """The label's log-odds (or logit) for each text, in the classifier's own tokens.

    Of alternatives, z_i - log(sum over j != i of exp z_j); where labels are independent, or there is one, z_i itself.
    Raises: UserError for a model without a trained head, an unknown label, or when scoring, a text beyond its context.
    """
    classifier = load(config.model, context)
    label = label_of(config, classifier.model.config)
    independent = classifier.model.config.problem_type == "multi_label_classification"

    def score(samples: Samples) -> Tensor:
        texts = [p + r if config.with_prompt else r for p, r in zip(samples.prompts, samples.responses, strict=True)]
        logits = all_logits(classifier, texts, context)
        wanted = logits[:, label]
        if config.output == "logit" or independent or logits.shape[1] == 1:
            return wanted
        others = torch.cat([logits[:, :label], logits[:, label + 1 :]], dim=1)
        return wanted - others.logsumexp(1)

    return score


def load(place: str, context: Context) -> Classifier:
    """The classifier at `place`, frozen, in the run's dtype below its head, which is in fp32.

    All of it is in fp32 while it is read: a head rounded to bf16 could not be widened again.

    Raises: UserError if it cannot be read, or its weights are not all there: a fresh head would score at random.
    """
    source = resolve(place)
    safe = {"trust_remote_code": False, "weights_only": True}
    with readable(source):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, config=load_config(source), dtype=torch.float32, output_loading_info=True, **safe
        )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if info["missing_keys"]:
        raise UserError(
            f"reward 'classifier': model '{place}' has no weights {', '.join(sorted(info['missing_keys'])[:3])}; "
            "expected a trained sequence classifier"
        )
    refuse_non_finite(model, place)
    _narrow_below_head(model, context.dtype)
    return Classifier(place, model.to(context.device).eval().requires_grad_(False), tokenizer)


def _narrow_below_head(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Everything below the head computes in `dtype`; the head stays in fp32 and takes its states so.

    A head is all that lies beside the base model: one matrix (`score`), or layers of its own, as RoBERTa has.
    """
    model.base_model.to(dtype)
    for head in model.children():
        if head is not model.base_model:
            head.register_forward_pre_hook(lambda _, given: tuple(x.float() for x in given))


def label_of(config: Config, model_config: Any) -> int:
    """The number of the label that is asked for.

    Raises: UserError that lists the labels.
    """
    names = _labels(model_config)
    listed = ", ".join(f"{number}={name}" for number, name in sorted(names.items()))
    if config.label is None and len(names) == 1:
        return 0
    if config.label in names:
        return int(config.label)
    for number, name in names.items():
        if name == config.label:
            return number
    near = suggest(str(config.label), list(names.values()))
    said = "no label" if config.label is None else f"label {config.label!r}"
    raise UserError(f"reward 'classifier': got {said}, expected label=one of {listed} of '{config.model}'{near}")


def _labels(model_config: Any) -> dict[int, str]:
    return {int(number): str(name) for number, name in model_config.id2label.items()}


@torch.no_grad()
def all_logits(classifier: Classifier, texts: list[str], context: Context) -> Tensor:
    """Logits [B, labels], fp32, of B texts."""
    tokenizer, model = classifier.tokenizer, classifier.model
    encoded = [_ids(classifier, text) for text in texts]
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
    """One, without padding, where the model does not know the padding id: a decoder's head looks for the last other."""
    pad = classifier.tokenizer.pad_token_id
    known = pad is not None and pad == getattr(classifier.model.config, "pad_token_id", None)
    return context.micro_batch_size if known else 1


def _ids(classifier: Classifier, text: str) -> list[int]:
    """The ids of a text; one without any, an empty response to a tokenizer that adds nothing, is BOS, else EOS."""
    tokenizer = classifier.tokenizer
    start = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None][:1]
    ids: list[int] = tokenizer(text)["input_ids"] or start
    limit = min(context_length(classifier.model.config), tokenizer.model_max_length)
    if not 0 < len(ids) <= limit:
        raise UserError(
            f"reward 'classifier': {text[:60]!r} has {len(ids)} tokens, expected 1 to {limit}, the context of "
            f"'{classifier.place}'; lower --response-length"
        )
    return ids
