"""Where a reward model reads a response: at the last token of what the template writes after its content.

transformers' sequence classifiers read the last token that is not padding. Of a whole dialogue from ChatML's template
that is the line break after `<|im_end|>`. Our reward models are trained there, so every tool gives the same score. A
template that writes no end token gets EOS from us; a model made elsewhere has never seen one there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.hub.short_names import resolve
from rlhf.models.load import load_config
from rlhf.models.scalar import ScalarModel, scores
from rlhf.models.traits import class_of
from rlhf.text.dialogues import Template
from rlhf.text.rendering import RENDER_ERRORS
from rlhf.text.templates import template_name
from rlhf.text.tokenizer import load_tokenizer
from rlhf.types import Message, Sequences

KEY = "score_ending"
"""the entry of a reward model's config.json: the ids after a response's content, at the last of which it is read"""
PROBE = (Message("user", "What is two plus two?"), Message("assistant", "It is four."))
DIFFERENCE = 0.02
"""of the scores of a dialogue by us and by plain transformers, as a share of their size, that rounding cannot explain:
twice the step of bf16"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The ids that follow a response's content, at the last of which a reward model is read. Without any, the content's
    last token is it."""

    ending: tuple[int, ...]
    foreign: bool = False
    """whether the model was made elsewhere, so that it reads its template's text as plain transformers does"""

    def finished(self, response: Sequence[int], end: int) -> list[int]:
        """A response with this ending in place of the last `end` ids."""
        return [*response[: len(response) - end], *self.ending]


def reading_of(path: str, template: Template) -> Reading:
    """How the reward model at `path` reads dialogues of its template."""
    config = load_config(path)
    ending = getattr(config, KEY, None)
    if ending is not None:
        return Reading(tuple(ending))
    written = template.written_ending(getattr(config, "pad_token_id", None))
    eos = template.ending[:1]
    if written[:1] != eos and template_name(str(template.tokenizer.chat_template)) is not None:
        return Reading(eos)  # the template is one of ours, so is the end token
    return Reading(written, foreign=True)


def set_reading(config: PreTrainedConfig, template: Template) -> None:
    """Write into a new reward model's config where it is trained, and read."""
    setattr(config, KEY, list(template.ending))


def describe(name: str, reading: Reading, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A line for the user on a model that is not read where ours are; None for the others."""
    if not reading.foreign:
        return None
    last = repr(tokenizer.decode(list(reading.ending[-1:]))) if reading.ending else "the last token of the response"
    return (
        f"reward model '{name}' was made elsewhere: read at {last}, where plain transformers reads its template's text"
    )


@torch.no_grad()
def compare(name: str, path: str, model: ScalarModel, reading: Reading, template: Template) -> str:
    """The score of one dialogue as we read it beside that of transformers' own classifier, with the same weights.

    The text is the one that the tokenizer's own files give, before any change of ours. Empty if it cannot be rendered.
    """
    cls, raw = class_of(AutoModelForSequenceClassification, model.backbone.config), load_tokenizer(resolve(path))
    try:
        ids = raw.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in PROBE], return_dict=False
        )
    except RENDER_ERRORS:
        return ""
    if cls is None:
        return ""
    device = next(model.backbone.parameters()).device
    theirs = _plain_score(cls, model, torch.tensor([ids], device=device))
    own = template.prompt_ids(PROBE[:1]) + reading.finished(template.response_ids(PROBE[1].content), 1)
    mask = torch.ones(1, len(own), dtype=torch.bool)
    ours = scores(model(Sequences(torch.tensor([own]), mask, mask)), mask).item()
    if abs(ours - theirs) <= DIFFERENCE * max(1.0, abs(theirs)):
        return f"; a test dialogue scores {ours:.4g} here and {theirs:.4g} there"
    return (
        f"; warning: a test dialogue scores {ours:.4g} here and {theirs:.4g} there, so the two read different tokens; "
        "name the model's own --chat-template, or another reward model"
    )


def _plain_score(cls: type[PreTrainedModel], model: ScalarModel, ids: Tensor) -> float:
    """The score of one row by a classifier of transformers, which gets our backbone and head in place of its own."""
    with torch.device("meta"):
        classifier = cls(model.backbone.config)
    setattr(classifier, classifier.base_model_prefix, model.backbone)
    classifier.score = model.score
    return float(classifier.eval()(input_ids=ids).logits[0, 0])
