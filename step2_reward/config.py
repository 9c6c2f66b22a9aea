"""Options and declaration of the reward model."""

from typing import Literal

from pydantic import Field

from rlhf.config.declaration import Curve, Declaration, Invariant, ModelWords, ReportParts, Result, Runs
from rlhf.config.options import ModelPath
from rlhf.supervised.options import SupervisedOptions

BASELINES = (("eval_words_rule", "a bag of words"), ("eval_length_rule", "the longer response"))
LOGISTIC = Runs("objective", ("pairwise", "every_token"))
"""runs whose loss is that of Bradley and Terry; the scores and the loss of another objective may have another scale"""
PAIRWISE = Runs("objective", ("pairwise",))
"""runs whose first loss is known; every_token adds token_coef times as much"""
STAGE = Declaration(
    name="step2_reward",
    title="A pairwise reward model on preferences.",
    help_groups={"the reward model": ("model", "num-train-epochs", "batch-size", "learning-rate", "objective")},
    models=("model",),
    scorer="model",
    report=ReportParts(
        section="Step 2, reward model",
        curves=(
            Curve("Loss", ("loss", "eval_loss"), (0.693147, "guessing"), PAIRWISE),
            Curve("Accuracy", ("accuracy", "eval_accuracy"), (0.5, "guessing")),
            Curve("Margin", ("margin", "eval_margin"), (0.0, "")),
            Curve("Loss at every token", ("token_loss",), (0.693147, "guessing"), LOGISTIC),
            Curve("Gradient norm", ("grad_norm",)),
            Curve("Learning rate", ("learning_rate", "learning_rate_of_head")),
            Curve("Speed", ("tokens_per_second",)),
        ),
        results=(
            Result("eval_accuracy", "accuracy on held-out pairs", share=True, baselines=BASELINES),
            Result("eval_loss", "Bradley-Terry loss on held-out pairs"),
        ),
        # The head is drawn so that scores are about N(0, 1): E log(1 + exp(-gap)) is between ln 2 and ln 2 + 2/8.
        invariants=(
            Invariant("loss of the first batch (0.693 for a zero-initialised head)", "loss", 0.35, 1.3, runs=PAIRWISE),
        ),
        pair_scores="heldout_scores.json",
    ),
    cards={
        "model": ModelWords(
            "reward model",
            "A reward model: the backbone of a language model with a scalar head. From pairs of responses it learned "
            "to give the preferred one the higher score.",
            "text-classification",
            tags=("reward-model",),
            more=(
                LOGISTIC,
                " The loss is that of Bradley and Terry (InstructGPT, [arXiv 2203.02155](https://arxiv.org/abs/"
                "2203.02155)): only the difference between the scores of two responses to one prompt has a meaning, "
                "and its sigmoid is the predicted share of people who prefer the first.",
            ),
        )
    },
)


class RewardConfig(SupervisedOptions):
    """A pairwise reward model: the backbone of a language model with a scalar head."""

    model: ModelPath = "opt-350m"
    """pretrained model, or the directory of a finished step 1: directory, hub id, short name or .yaml"""
    num_train_epochs: int = Field(1, ge=1)
    """passes over the data; more than one pass overfits human preferences"""
    learning_rate: float = Field(1e-5, ge=0)
    """peak learning rate of AdamW"""
    head_learning_rate: float | None = Field(None, gt=0)
    """peak learning rate of the score head; none: learning_rate. The head is new and the rest is not, so with few pairs
    it needs a hundred times more (1e-3 to 1e-2); with learning_rate 0 it alone learns, which takes a third of the
    time"""
    objective: str = "pairwise"
    """the loss, a file of step2_reward/objectives/ such as pairwise or every_token, or a Python file of yours, with
    its options after commas: pairwise,centering=0.01 or my_objective.py,gap=2"""
    keep_best: Literal["eval_accuracy", "eval_loss"] | None = None
    """metric of the evaluations of eval_every; the model with its best value is the result, not the last model"""
