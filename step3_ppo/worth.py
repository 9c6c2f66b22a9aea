"""What the tuned policy is worth in samples of the policy before training: "as good as the best of 45 before".

Before training the policy gives K responses to P held-out prompts, from a random stream that no iteration has. Their
best-of-n is close to the most that any policy gains at its KL (rlhf/maths/best_of_n.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from data.dataset import PromptDataset
from data.prepare.encode import Prompt
from rlhf import console
from rlhf.distributed import collectives
from rlhf.maths import best_of_n
from rlhf.rewards import Source, as_samples
from rlhf.storage import disk
from rlhf.training import random_sources
from rlhf.types import Metrics
from step3_ppo.config import BEST_OF, STAGE
from step3_ppo.heldout import Evaluation
from step3_ppo.learner import Learner
from step3_ppo.rollout import combined_scores
from step3_ppo.schedule import iterations

AT_START = 2**20 - 2
"""number of the rollout of these responses, which neither an iteration nor an evaluation has"""
SHARE = 10
"""the run samples at least so many responses for each one here"""
FEWEST, WANTED, MOST = 4, 64, 256
"""responses to a prompt. With fewer than FEWEST nothing is reported. Of a larger budget, first each of PROMPTS prompts
gets WANTED, then more prompts do, at last all get up to MOST. Best of 64 has a KL of 3.2 nats, of 256 one of 4.5"""
PROMPTS = 32
"""enough, because the gain of best-of-n differs less between prompts than that of single responses does"""
ENOUGH = 10.0
"""effective sample size above which importance weights lose less than 4 % of the gain, if scores are normal"""
ROUNDING = 0.05
"""of the standard deviation of the scores: bf16 rounds to 0.004 of a number"""
OTHERS = 0.1
"""of the responses before training may be others, by rounding while they were sampled"""
COLUMNS = "scores", "judge"
"""of the file: a list of K for each prompt, of which the first is that of the evaluation before training"""


def size(responses: int, prompts: int, ranks: int) -> tuple[int, int]:
    """(P, responses to a prompt beside that of the evaluation) for a run of so many responses; the latter may be 0, as
    of one prompt, whose interval would be infinite."""
    budget = responses // SHARE
    p = min(prompts, max(PROMPTS, ranks, budget // (WANTED - 1)))
    more = min(budget // p, MOST - 1)
    return p, more if p > 1 and more >= FEWEST - 1 else 0


def measure(
    learner: Learner, evaluation: PromptDataset[Prompt], judge: Source | None, before: Evaluation
) -> Tensor | None:
    """Scores, and with a judge its scores, of the policy as it is, before training: [1 or 2, P, K], of which the first
    of K is that of the evaluation. None if too few responses are allowed. A run that resumes has them in a file. All
    ranks call this together."""
    config = learner.config
    responses = iterations(config) * config.batch_size
    p, more = size(responses, len(before.scores), collectives.dp_size())
    if not more:
        return None
    path = Path(config.output_dir) / STAGE.name / BEST_OF
    judged = [] if judge is None or before.judge_scores is None else [before.judge_scores]
    first = torch.stack([before.scores, *judged])[:, :p]
    saved = collectives.gather_objects(read_scores(path, len(first)) if collectives.is_main() else None)[0]
    if saved is not None and saved.shape == (*first.shape, more + 1) and _alike(saved[:, :, 0], first):
        return saved
    console.status(f"{STAGE.name}: sampling {p * more} more responses before training, to compare with best-of-n")
    rows = [i for i in collectives.rows_of_rank(p) for _ in range(more)]
    sampled = learner.sample(evaluation, rows, AT_START)
    with random_sources.apart(config.seed):
        scores = [combined_scores(sampled, learner.scorer)[0]]
        scores += [] if judge is None else [judge(as_samples(sampled, learner.scorer.tokenizer))]
    others = [collectives.of_all_ranks(values.float().view(-1, more).tolist()) for values in scores]
    start = torch.cat([first[:, :, None], torch.tensor(others)], dim=2)
    if not start.isfinite().all():
        console.say(f"warning: {STAGE.name}: a score before training is no finite number, so no best-of-n is reported")
        return None
    if collectives.is_main():
        lines = (dict(zip(COLUMNS, columns, strict=False)) for columns in start.transpose(0, 1).tolist())
        disk.write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    return start


def read_scores(path: Path, columns: int) -> Tensor | None:
    """The scores in the file, and the judge's as the second of two columns: [columns, P, K]; None if it has none."""
    rows = [[row.get(name, 0) for name in COLUMNS[:columns]] for row in disk.json_lines(path)]
    try:
        scores = torch.tensor(rows)
    except (TypeError, ValueError):  # a line is damaged, or of another run
        return None
    return scores.transpose(0, 1) if scores.dim() == 3 else None


def _alike(saved: Tensor, first: Tensor) -> bool:
    """Whether two rows of scores [P] are of the same responses by the same source. On another number of processes the
    scores have other rounding, and a few responses may be others; of another seed nearly all are."""
    far = (saved - first).abs() > ROUNDING * first.std(1, correction=0, keepdim=True)
    return bool((far.double().mean(1) <= OTHERS).all())


def worth(start: Tensor | None, before: Evaluation, after: Evaluation) -> Metrics:
    """At which n the policy has the score, and the judge's score, of best-of-n before training; and its efficiency.

    The score chooses among n. The gains are over the mean response before training to the same prompt: the policy's of
    all held-out prompts, best-of-n's of the first P.
    """
    pairs = [("score", before.scores, after.scores)]
    if before.judge_scores is not None and after.judge_scores is not None:
        pairs.append(("judge", before.judge_scores, after.judge_scores))
    return {} if start is None else worth_of(start, pairs, after.kl)


def worth_of(start: Tensor, pairs: Sequence[tuple[str, Tensor, Tensor]], kl: Tensor) -> Metrics:
    """The same numbers of `pairs`, (name, before, after) of the held-out responses [N]. kl: nats of each response"""
    start, metrics = start.double(), {"eval_best_of": float(start.shape[2])}
    for samples, (name, old, new) in zip(start, pairs, strict=False):
        if not new.isfinite().all():
            continue
        mean_before = old.double().clone()
        mean_before[: len(samples)] = samples.mean(1)
        gains, best = new.double() - mean_before, best_of_n.expected_gains(start[0], samples)
        n = best_of_n.worth(gains, best)
        names = (f"eval_{name}_worth_{end}" for end in ("best_of", "low", "high"))
        metrics |= dict(zip(names, (n.mean, n.low, n.high), strict=True))
        efficiency = best_of_n.efficiency(gains, best, kl) if name == "score" else None
        if efficiency is not None:
            metrics |= {"eval_score_efficiency": efficiency.mean, "eval_score_efficiency_ci95": efficiency.half_width}
            possible = best_of_n.gibbs(samples, kl.mean().item())
            if possible is not None and possible[1] >= ENOUGH:
                metrics["eval_score_efficiency_gibbs"] = gains.mean().item() / possible[0]
    return metrics
