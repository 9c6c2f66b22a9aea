"""Which choice of a question a policy finds most probable: the accuracy `acc` of lm-evaluation-harness.

answer = argmax_c  sum_t log pi(c_t | question, c_<t)
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.prepare.encode import Demonstration
from data.read.choices import Question
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.models.policy import Policy
from rlhf.supervised.demonstrations import logprob_sums


def encode_choices(question: Question, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    """The question with each of its choices. The ids of a choice are those that it adds to the question's."""
    question_length = len(tokenizer(question.text).input_ids)
    rows = [tuple(tokenizer(f"{question.text} {choice}").input_ids) for choice in question.choices]
    return [Demonstration(ids, ((question_length, len(ids)),)) for ids in rows]


def right_answers(
    policy: Engine[Policy] | FrozenEngine[Policy],
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    eval_rows: int,
) -> Tensor:
    """Whether the policy's most probable choice is the right one, float64 [N]; of equal ones the first counts."""
    rows = [row for question in questions for row in encode_choices(question, tokenizer)]
    logprobs = logprob_sums(policy, rows, eval_rows, tokenizer.pad_token_id).tolist()
    right, end = [], 0
    for question in questions:
        end += len(question.choices)
        choices = logprobs[end - len(question.choices) : end]
        right.append(float(choices.index(max(choices)) == question.answer))
    return torch.tensor(right, dtype=torch.float64)
