"""What the tuned policy is worth in samples of the policy before training: "as good as the best of 45 before".

Before training the policy gives K responses to P held-out prompts, from a random stream that no iteration has. Their
best-of-n is close to the most that any policy gains at its KL (rlhf/maths/best_of_n.py).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.build.encode import Prompt
from data.dataset import PromptDataset
from rlhf import console
from rlhf.distributed import collectives
from rlhf.maths import best_of_n
from rlhf.rewards import Source, as_samples
from rlhf.storage import disk
from rlhf.training import random_sources
from rlhf.types import Metrics
from step3_ppo.config import BEST_OF, STAGE
from step3_ppo.heldout import Evaluation, of_all_ranks
from step3_ppo.learner import Learner
from step3_ppo.rollout import combined_scores
from step3_ppo.schedule import iterations

AT_START = 2**20 - 2
"""number of the rollout of these responses, which neither an iteration nor an evaluation has"""
SHARE = 10
"""they are at most one for so many of the run's responses"""
FEWEST, WANTED, MOST = 4, 64, 256
"""responses to a prompt: below the first nothing is said; more prompts come before more than the second. 64 have a KL
of 3.2 nats, 256 of 4.5. The gain of best-of-n differs less between prompts than that of single responses does, so 32
prompts are enough for it"""
PROMPTS = 32
ENOUGH = 10.0
"""effective sample size above which importance weights lose less than 4 % of the gain, if scores are normal"""


@dataclass(frozen=True, slots=True)
class Start:
    """Scores [P, K] of the policy before training, for the first P held-out prompts. The first of the K responses is
    that of the evaluation before training."""

    scores: Tensor
    judge_scores: Tensor | None


def size(responses: int, prompts: int, ranks: int) -> tuple[int, int]:
    """(P, responses to a prompt beside that of the evaluation) for a run of so many responses; the latter may be 0."""
    budget = responses // SHARE
    p = min(prompts, max(PROMPTS, ranks, budget // (WANTED - 1)))
    more = min(budget // p, MOST - 1)
    return p, more if more >= FEWEST - 1 else 0


def measure(
    learner: Learner, evaluation: PromptDataset[Prompt], judge: Source | None, before: Evaluation
) -> Start | None:
    """The scores of the policy as it is, before training; None if too few responses are allowed. A run that resumes has
    them in a file, unless it scores in another way. All ranks call this together."""
    config = learner.config
    responses = iterations(config) * config.batch_size
    p, more = size(responses, len(before.scores), collectives.dp_size())
    if not more:
        return None
    path = Path(config.output_dir) / STAGE.name / BEST_OF
    first = Start(before.scores[:p, None], None if before.judge_scores is None else before.judge_scores[:p, None])
    saved = _read(path, first, more)
    if saved is not None:
        return saved
    console.status(f"{STAGE.name}: {p * more} more responses before training, with which the result is compared")
    rows = [i for i in range(collectives.dp_rank(), p, collectives.dp_size()) for _ in range(more)]
    sampled = learner.sample(evaluation, rows, AT_START)
    with random_sources.apart(config.seed):
        scores = [combined_scores(sampled, learner.scorer)[0]]
        scores += [] if judge is None else [judge(as_samples(sampled, learner.scorer.tokenizer))]
    by_prompt = [torch.tensor(of_all_ranks(values.float().view(-1, more).tolist())) for values in scores]
    if not all(values.isfinite().all() for values in by_prompt):
        console.say(f"warning: {STAGE.name}: a score before training is no finite number, so no best-of-n is reported")
        return None
    judged = None if first.judge_scores is None else torch.cat([first.judge_scores, by_prompt[1]], dim=1)
    start = Start(torch.cat([first.scores, by_prompt[0]], dim=1), judged)
    if collectives.is_main() and not path.exists():
        columns = {"scores": start.scores.tolist()} | ({} if judged is None else {"judge": judged.tolist()})
        lines = (json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True))
        disk.write_text(path, "".join(lines))
    return start


def _read(path: Path, first: Start, more: int) -> Start | None:
    """The scores in the file, if it has so many, and those of the first responses are still the same: the seed, the
    policy and what scores it are."""
    rows = collectives.gather_objects(disk.json_lines(path) if collectives.is_main() else None)[0]

    def column(name: str, expected: Tensor) -> Tensor | None:
        values: Sequence[Sequence[float]] = [row.get(name, ()) for row in rows]
        if {len(scores) for scores in values} != {more + 1} or [[scores[0]] for scores in values] != expected.tolist():
            return None
        return torch.tensor(values)

    scores = column("scores", first.scores)
    judged = None if first.judge_scores is None else column("judge", first.judge_scores)
    if scores is None or (judged is None) != (first.judge_scores is None):
        return None
    return Start(scores, judged)


def worth(start: Start | None, before: Evaluation, after: Evaluation) -> Metrics:
    """At which n the policy has the score, and the judge's score, of best-of-n before training; and its efficiency.

    The score chooses among n. The gain is that of all held-out prompts; best-of-n's is that of the first P.
    """
    if start is None:
        return {}
    metrics = {"eval_best_of": float(start.scores.shape[1])}
    gains, best = _gains(start.scores, start, before.scores, after.scores)
    if not gains.isfinite().all():
        return {}
    metrics |= _worth("eval_score", gains, best)
    efficiency = best_of_n.efficiency(gains, best, after.kl)
    if efficiency is not None:
        metrics |= {"eval_score_efficiency": efficiency.mean, "eval_score_efficiency_ci95": efficiency.half_width}
        possible = best_of_n.gibbs(start.scores, after.kl.mean().item())
        if possible is not None and possible[1] >= ENOUGH:
            metrics["eval_score_efficiency_gibbs"] = gains.mean().item() / possible[0]
    if start.judge_scores is not None and before.judge_scores is not None and after.judge_scores is not None:
        gains, best = _gains(start.judge_scores, start, before.judge_scores, after.judge_scores)
        metrics |= _worth("eval_judge", gains, best) if gains.isfinite().all() else {}
    return metrics


def _gains(scores: Tensor, start: Start, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Gains of the policy [N] and of best-of-n [P, K] over the mean response before training to the same prompt."""
    mean, own = scores.double().mean(1), before.double().clone()
    own[: len(mean)] = mean
    return after.double() - own, best_of_n.expected_scores(start.scores, scores) - mean[:, None]


def _worth(metric: str, gains: Tensor, best: Tensor) -> Metrics:
    n = best_of_n.worth(gains, best)
    return {f"{metric}_worth_best_of": n.mean, f"{metric}_worth_low": n.low, f"{metric}_worth_high": n.high}
