"""Options and declaration of supervised fine-tuning."""

from typing import Literal

from pydantic import Field

from rlhf.config.declaration import Curve, Declaration, ModelWords, ReportParts, Result
from rlhf.config.options import ModelPath
from rlhf.supervised.options import SupervisedOptions

STAGE = Declaration(
    name="step1_sft",
    title="Supervised fine-tuning on responses.",
    help_groups={
        "fine-tuning": (
            "model",
            "num-train-epochs",
            "batch-size",
            "learning-rate",
            "objective",
            "loss-on",
            "add-tokens",
        ),
    },
    models=("model",),
    policies=("model",),
    reference="model",
    report=ReportParts(
        section="Step 1, fine-tuning",
        curves=(
            Curve("Loss", ("loss",)),
            Curve("Gradient norm", ("grad_norm",)),
            Curve("Perplexity of held-out responses", ("eval_perplexity",)),
            Curve("Learning rate", ("learning_rate",)),
            Curve("Speed", ("tokens_per_second",)),
        ),
        results=(Result("eval_perplexity", "perplexity of held-out responses"),),
    ),
    cards={
        "model": ModelWords(
            "fine-tuned policy",
            "A language model after supervised fine-tuning (SFT) on responses to prompts: the first stage of RLHF "
            "(InstructGPT, [arXiv 2203.02155](https://arxiv.org/abs/2203.02155)).",
            "text-generation",
            tags=("sft",),
        )
    },
)


class SFTConfig(SupervisedOptions):
    """Supervised fine-tuning of a causal language model on responses."""

    model: ModelPath = "opt-1.3b"
    """pretrained model: directory, hub id, short name or .yaml"""
    objective: Literal["response", "text"] = "response"
    """response = learn responses to prompts; text = continued pretraining on rows of plain text, packed end to end into
    contexts of max_length tokens; a token also attends to the earlier texts in its context"""
    loss_on: Literal["last", "every", "all"] = "last"
    """tokens of a dialogue that count in the loss: the last assistant turn, every assistant turn, or all tokens"""
    add_tokens: str | None = None
    """file of new tokens, one on a line; the row of each in embeddings and head begins as the mean of its pieces' rows,
    and is trained, with an adapter too"""
    extend_tokenizer: str | None = None
    """another tokenizer (directory, tokenizer.json, hub id), whose tokens are added in that way (a new language)"""
    learning_rate: float = Field(2e-5, ge=0)
    """peak learning rate of AdamW"""
    keep_best: Literal["eval_perplexity"] | None = None
    """metric of the evaluations of eval_every; the model with its best value is the result, not the last model"""
