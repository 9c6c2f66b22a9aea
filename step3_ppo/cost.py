"""What the training costs: what the policy could do before and was not rewarded for."""

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.read.choices import Question, read_questions
from rlhf.errors import UserError
from rlhf.maths.intervals import win_rate_interval
from rlhf.models.load import context_length, load_config
from rlhf.supervised.choices import encode_choices, right_answers
from rlhf.supervised.demonstrations import held_out, perplexity
from rlhf.types import Metrics
from step3_ppo.config import MAKERS
from step3_ppo.learner import Learner


def open_questions(
    option: str, path: str | None, model_path: str, tokenizer: PreTrainedTokenizerBase
) -> list[Question]:
    """The questions that an option names; none if it is not set. Raises: UserError for questions that cannot be read,
    or do not fit the model's context."""
    if path is None:
        return []
    questions, limit = read_questions(path), context_length(load_config(model_path))
    longest = max(len(row.ids) for question in questions for row in encode_choices(question, tokenizer))
    if longest > limit:
        raise UserError(
            f"{option} {path}: got a question of {longest} tokens, expected at most {limit}, the context of "
            f"'{model_path}'; leave it out"
        )
    return questions


class Cost:
    """What is measured on rows that no reward sees. The first measurement is that before training."""

    def __init__(self, learner: Learner) -> None:
        """Raises: UserError if the questions cannot be read."""
        self._learner, config = learner, learner.config
        stage = Path(config.output_dir) / MAKERS["actor_model"]
        # Of a policy from elsewhere nobody knows the demonstrations.
        self._demonstrations = held_out(stage, learner.scorer.tokenizer) if config.actor_model is None else None
        self._questions = [] if config.multiple_choice is None else read_questions(config.multiple_choice)
        self._right_before: Tensor | None = None

    def measure(self) -> Metrics:
        """The numbers of the policy as it is now."""
        actor, tokenizer, rows = self._learner.actor, self._learner.scorer.tokenizer, self._learner.config.eval_rows
        metrics = {}
        if self._demonstrations:
            metrics["eval_perplexity"] = perplexity(actor, self._demonstrations, rows, tokenizer.pad_token_id)
        if self._questions:
            right = right_answers(actor, self._questions, tokenizer, rows)
            metrics["eval_choices"] = right.mean().item()
            if self._right_before is None:
                self._right_before = right
            elif len(right) > 1:
                metrics["eval_choices_gain_ci95"] = paired_half_width(self._right_before, right)
        return metrics


def paired_half_width(before: Tensor, after: Tensor) -> float:
    """Half the 95 % interval of the change of a share, [N] answers before and after: that of paired proportions."""
    return 2 * win_rate_interval((after - before + 1) / 2).half_width
