"""Which choice of a question a policy finds most probable: the accuracy `acc` of lm-evaluation-harness.

answer = argmax_c  sum_t log pi(c_t | question, c_<t)
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import sft_batch
from data.prepare.encode import Demonstration
from data.read.choices import Question
from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.models.policy import Policy
from rlhf.types import length_groups


def encode_choices(question: Question, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    """The question with each of its choices. The ids of a choice are those that it adds to the question's."""
    question_length = len(tokenizer(question.text).input_ids)
    rows = [tuple(tokenizer(f"{question.text} {choice}").input_ids) for choice in question.choices]
    return [Demonstration(ids, ((question_length, len(ids)),)) for ids in rows]


def right_answers(
    policy: Engine[Policy], questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, eval_rows: int
) -> Tensor:
    """Whether the policy's most probable choice is the right one, float64 [N]; of equal ones the first counts."""
    rows = [row for question in questions for row in encode_choices(question, tokenizer)]
    of_rank = collectives.rows_of_rank(len(rows))
    groups = length_groups(torch.tensor([len(rows[i].ids) for i in of_rank]), eval_rows)
    with policy.inference() as model:
        batches = (sft_batch([rows[of_rank[i]] for i in group], tokenizer.pad_token_id) for group in groups)
        sums = torch.cat([model(batch).logprobs.double().sum(1).cpu() for batch in batches])
    logprobs = collectives.of_all_ranks(sums[torch.cat(groups).argsort()].tolist())[: len(rows)]
    right, end = [], 0
    for question in questions:
        end += len(question.choices)
        choices = logprobs[end - len(question.choices) : end]
        right.append(float(choices.index(max(choices)) == question.answer))
    return torch.tensor(right, dtype=torch.float64)
