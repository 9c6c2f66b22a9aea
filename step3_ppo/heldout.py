"""Evaluation of the policy on held-out prompts: scores, KL, response length, diversity."""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import console
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.evaluation.results_table import distinct
from rlhf.maths import ops
from rlhf.maths.intervals import mean_interval
from rlhf.maths.preferences import position_bias
from rlhf.rewards import NO_SCORE, Source, as_samples
from rlhf.storage import disk
from rlhf.text.rendering import last_question
from rlhf.types import Metrics, Samples, ScoredRollout


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The N sampled responses of all ranks, in the order of their prompts, and their numbers: tensors [N]."""

    prompts: tuple[str, ...]
    questions: tuple[str, ...]
    """the user's last turn of each prompt"""
    responses: tuple[str, ...]
    tokens: tuple[list[int], ...]
    """ids of each response; its text can have others, which the policy would give another probability"""
    scores: Tensor
    judge_scores: Tensor | None
    kl: Tensor
    ref_nll: Tensor
    lengths: Tensor
    ended: Tensor
    distinct_2: float
    by_source: dict[str, Tensor] = field(default_factory=dict)
    """scores [N] of each reward source, if there are several"""
    answers: tuple[str, ...] = ()
    """the responses without their thoughts"""
    verdicts: Tensor | None = None
    """[N, 2] of a judge of pairs, on the answers before training and these; `judge_scores` are their means"""


def gather_evaluation(
    rollout: ScoredRollout,
    judge: Source | None,
    tokenizer: PreTrainedTokenizerBase,
    source_scores: Mapping[str, Tensor],
    before: Evaluation | None = None,
) -> Evaluation:
    """The numbers of a scored rollout, of all ranks. source_scores: [B] of each reward source by its name. before: the
    evaluation with which a judge of pairs compares this one; None: this is the one before training.

    The KL is the mean of log pi(y|x) - log ref(y|x), both by the training forward pass in the same batches: so it is 0
    for equal weights in any dtype. The policy as it sampled y, pi_s, is another one in bf16, by which the mean is too
    small by KL(pi_s, pi): up to about 0.001 nats a token. With log pi_s in place of log pi the KL would be too large by
    the rounding of sampling.
    """
    samples, tokens = as_samples(rollout, tokenizer), collectives.of_all_ranks(rollout.response_tokens())
    judge_scores = verdicts = None
    if (of_pairs := getattr(judge, "compare", None)) is not None:
        rows = collectives.rows_of_rank(0 if before is None else len(before.answers))
        first = samples.answers if before is None else [before.answers[i] for i in rows]
        verdicts = _all(of_pairs(rollout.rows, first, samples.answers))
        judge_scores = verdicts.mean(1)
    elif judge is not None:
        judge_scores = _all(judge(samples))
    return Evaluation(
        prompts=tuple(collectives.of_all_ranks(samples.prompts)),
        questions=tuple(collectives.of_all_ranks([last_question(row.prompt) for row in rollout.rows])),
        responses=tuple(collectives.of_all_ranks(samples.responses)),
        tokens=tuple(tokens),
        scores=_all(rollout.scores),
        judge_scores=judge_scores,
        kl=_all(ops.zero_off_mask(rollout.logprobs - rollout.ref_logprobs, rollout.mask).sum(1)),
        ref_nll=_all(-rollout.ref_logprobs.sum(1)),
        lengths=_all(rollout.lengths),
        ended=_all(rollout.ended),
        distinct_2=distinct(tokens, 2),
        by_source={name: _all(scores) for name, scores in source_scores.items()} if len(source_scores) > 1 else {},
        answers=tuple(collectives.of_all_ranks(samples.answers)),
        verdicts=verdicts,
    )


def nonfinite_scores(evaluation: Evaluation) -> str | None:
    """Which score is not finite for which held-out response, the same on every rank; None if all are finite."""
    e = evaluation
    for name, values in {"score": e.scores, "judge": e.judge_scores, **e.by_source}.items():
        if values is None:
            continue
        missing = values == NO_SCORE
        if name == "score" or (name == "judge" and missing.all()):
            missing = torch.zeros_like(missing)
        bad = (~(values.isfinite() | missing)).nonzero().flatten().tolist()
        if bad:
            return (
                f"{name} is not a finite number for {len(bad)} of {len(e.scores)} held-out responses, the first to "
                f"prompt {e.prompts[bad[0]][-60:]!r}; check what --reward and --judge return for it"
            )
    return None


def _all(values: Tensor) -> Tensor:
    return torch.tensor(collectives.of_all_ranks(values.float().tolist()))


def compare(before: Evaluation, after: Evaluation) -> Metrics:
    """Final numbers of a run: the policy after against before, on the same prompts. KL in nats per response."""
    metrics = {
        "eval_score_before": before.scores.mean().item(),
        "eval_score": after.scores.mean().item(),
        "eval_score_ci95": _ci95(after.scores),
        "eval_kl": after.kl.mean().item(),
        "eval_kl_ci95": _ci95(after.kl),
        "eval_kl_floor": before.kl.mean().item(),  # the weights were the reference's
        "eval_response_length": after.lengths.mean().item(),
        "eval_ended": after.ended.mean().item(),
        "eval_ref_nll_before": (before.ref_nll.sum() / before.lengths.sum()).item(),
        "eval_ref_nll": (after.ref_nll.sum() / after.lengths.sum()).item(),
        "eval_distinct_2_before": before.distinct_2,
        "eval_distinct_2": after.distinct_2,
        "eval_changed": sum(map(operator.ne, before.responses, after.responses)) / len(after.responses),
    }
    for name, scores in after.by_source.items():
        metrics[f"eval_score_{name}_before"] = _of_scored(before.by_source[name]).mean().item()
        metrics[f"eval_score_{name}"] = _of_scored(scores).mean().item()
    if before.judge_scores is not None and after.judge_scores is not None:
        both = (before.judge_scores != NO_SCORE) & (after.judge_scores != NO_SCORE)
        old, new = before.judge_scores[both], after.judge_scores[both]
        metrics |= {
            "eval_judge_before": old.mean().item(),
            "eval_judge": new.mean().item(),
            "eval_judge_ci95": _ci95(new),
            "eval_judge_gain_ci95": _ci95(new - old),
        }
        if not both.all():
            metrics["eval_judge_unread"] = 1 - both.double().mean().item()
    if after.verdicts is not None:
        metrics |= {f"eval_judge_{name}": share for name, share in position_bias(after.verdicts).items()}
    return metrics


def at_start(before: Evaluation) -> Metrics:
    """The same numbers of the policy that the run starts from."""
    return {name: value for name, value in compare(before, before).items() if not name.endswith("_before")}


def _of_scored(scores: Tensor) -> Tensor:
    """The scores of a source where it applies."""
    return scores[scores != NO_SCORE]


def _ci95(values: Tensor) -> float:
    """Half the width of the 95 % interval of the mean, [N] values."""
    return mean_interval(values).high - values.double().mean().item() if len(values) > 1 else float("nan")


def write_samples(
    path: Path, iteration: int, before: Evaluation, after: Evaluation, groups: Sequence[str] = ()
) -> list[Tree]:
    """Append a line for each held-out prompt of all ranks: both responses, their numbers, and the ids of the second.
    Rank 0 writes, and returns what it wrote without the ids; other ranks return nothing. groups: of the prompts, if
    they have any"""
    rows: list[Tree] = []
    if not collectives.is_main():
        return rows
    texts = zip(after.prompts, after.questions, before.responses, after.responses, strict=True)
    with path.open("a", encoding="utf-8") as file:
        for i, (prompt, question, old, new) in enumerate(texts):
            row = {"iteration": iteration, "prompt": prompt, "question": question, "before": old, "after": new}
            row |= {"score_before": before.scores[i].item(), "score": after.scores[i].item(), "kl": after.kl[i].item()}
            if before.judge_scores is not None and after.judge_scores is not None:
                row |= {"judge_before": before.judge_scores[i].item(), "judge": after.judge_scores[i].item()}
            if groups:
                row["group"] = groups[i]
            rows.append(disk.json_value(row))
            file.write(json.dumps(rows[-1] | {"tokens": after.tokens[i]}, ensure_ascii=False) + "\n")
    return rows


def write_rollout(path: Path, iteration: int, rollout: ScoredRollout, names: Sequence[str], samples: Samples) -> None:
    """Append a line for each response of this rank: its text, its score by each source in `names`, KL and length."""
    numbers = {
        "score": rollout.scores,
        "kl": (rollout.logprobs - rollout.ref_logprobs).sum(1),
        "tokens": rollout.lengths,
    }
    numbers |= {"ended": rollout.ended} | dict(zip(names, rollout.source_scores.unbind(1), strict=True))
    columns = {name: values.tolist() for name, values in numbers.items()}
    with path.open("a", encoding="utf-8") as file:
        for i, (prompt, response) in enumerate(zip(samples.prompts, samples.responses, strict=True)):
            row = {"iteration": iteration, "prompt": prompt, "response": response}
            row |= {name: None if values[i] == NO_SCORE else values[i] for name, values in columns.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def show_samples(before: Evaluation, after: Evaluation, count: int) -> None:
    """A table of the users' last turns, with the responses before and after training side by side."""
    rows = [
        (question, f"{old}\n[{old_score:.2f}]", f"{new}\n[{new_score:.2f}]")
        for question, old, new, old_score, new_score in zip(
            after.questions,
            before.responses,
            after.responses,
            before.scores.tolist(),
            after.scores.tolist(),
            strict=True,
        )
    ]
    console.show_table("held-out prompts [score]", ("prompt", "before", "after"), rows[:count])
