"""The results of policies against the baseline: numbers, tables, and files."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf import console
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.evaluation.batch_generation import RESULTS
from rlhf.evaluation.comparison import Comparison, Responses
from rlhf.maths import best_of_n
from rlhf.maths.intervals import Interval, mean_interval, pair_differences, pair_wins, win_rate_interval
from rlhf.maths.length_control import length_controlled_win_rate
from rlhf.storage import disk, manifests
from rlhf.text.dialogues import Template
from rlhf.text.rendering import last_question

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""title, column names, rows"""

NOTE = (
    "Intervals are 95 %, over prompts. Score, gain and KL: Student's t of the prompts' means. Win rate: pairs of "
    "different draws, a tie one half, and the t interval with one prompt won and one lost added (after Bonett & Price "
    "2012). At equal length: the win rate by a logistic regression on the difference of lengths (AlpacaEval 2). "
    "KL: k1, nats per response."
)
ROUNDING = 1e-9
"""of the largest score: a smaller gain is the rounding of sums"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Best-of-n of one policy: the selected response's score by the judge, over prompts."""

    policy: str
    n: int
    kl: float
    """to the policy, nats per response"""
    score: Interval
    gain: Interval
    """over a response without selection, prompt by prompt"""
    share: float | None
    """the gain as a share of the gain if the judge itself selects; None if the judge has nothing to gain"""


def selections(policy: str, selector: Tensor, scores: Tensor) -> list[Selection]:
    """The curve over n of K responses to each of N prompts. selector, scores [N, K]: by the selector and the judge."""
    result, scores = [], scores.double()
    curves = [best_of_n.expected_scores(by, scores) for by in (selector, scores)]
    for n in best_of_n.sizes(scores.shape[1])[1:]:
        selected, best = (curve[:, n - 1] for curve in curves)
        gain, most = selected - scores.mean(1), (best - scores.mean(1)).mean().item()
        share = gain.mean().item() / most if most > ROUNDING * scores.abs().max().item() else None
        result.append(Selection(policy, n, best_of_n.kl(n), mean_interval(selected), mean_interval(gain), share))
    return result


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The results of one policy. Lengths in tokens, EOS included; KL in nats per response, NLL in nats per token."""

    policy: str
    score: Interval
    gain: Interval | None
    """score minus the baseline's, averaged over prompts; None for the baseline"""
    win_rate: Interval | None
    """against the baseline; None for the baseline"""
    length_controlled_win_rate: float | None
    """against the baseline, at equal length; None for the baseline"""
    kl: Interval
    response_length: float
    ended: float
    """share of the responses that ended with EOS"""
    ref_nll: float
    """negative log-likelihood under the reference"""
    distinct_2: float
    worth: Interval | None = None
    """the n whose best-of-n of the baseline, by the selector, has this score; at K of K responses it is K or more.
    None for the baseline, and without a selector"""


def policy_results(responses: dict[str, Responses]) -> list[PolicyResult]:
    """The results of every policy, in the same order; the first is the baseline."""
    baseline = next(iter(responses.values()))
    return [_policy_result(name, r, None if r is baseline else baseline) for name, r in responses.items()]


def _policy_result(name: str, policy: Responses, baseline: Responses | None) -> PolicyResult:
    gain = win_rate = at_equal_length = worth = None
    if baseline is not None:
        gains = policy.scores.mean(1) - baseline.scores.mean(1)
        gain = mean_interval(gains)
        wins = pair_wins(policy.scores, baseline.scores, _equal_responses(policy, baseline))
        win_rate = win_rate_interval(wins.mean(1))
        at_equal_length = length_controlled_win_rate(wins, pair_differences(policy.lengths, baseline.lengths))
        if baseline.selector is not None:
            worth = best_of_n.worth(gains, best_of_n.expected_gains(baseline.selector, baseline.scores))
    return PolicyResult(
        policy=name,
        score=mean_interval(policy.scores.mean(1)),
        gain=gain,
        win_rate=win_rate,
        length_controlled_win_rate=at_equal_length,
        worth=worth,
        kl=mean_interval(policy.kl.mean(1)),
        response_length=policy.lengths.mean().item(),
        ended=policy.ended.mean().item(),
        ref_nll=(policy.ref_nll.sum() / policy.lengths.sum()).item(),
        distinct_2=distinct(policy.tokens, 2),
    )


def _equal_responses(first: Responses, second: Responses) -> Tensor:
    """[N, K, K]: whether response j of `first` and l of `second` have the same text, and both or neither ended."""
    sides = [
        [list(zip(texts, ended, strict=True)) for texts, ended in zip(r.texts, r.ended.tolist(), strict=True)]
        for r in (first, second)
    ]
    return torch.tensor(
        [[[response == other for other in others] for response in own] for own, others in zip(*sides, strict=True)]
    )


def distinct(responses: Sequence[Sequence[int]], n: int) -> float:
    """Share of distinct n-grams among all n-grams of the responses (Li et al. 2016, arXiv 1510.03055)."""
    grams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def table(results: Sequence[PolicyResult]) -> Table:
    """The policies in their order."""
    best_of = ["best of n of the baseline"] if any(s.worth is not None for s in results) else []
    columns = (
        "policy", "score", "gain", "win rate", "at equal length", "KL", "length", "ended", "distinct-2",
        *best_of,
    )  # fmt: skip
    rows = [
        (
            s.policy,
            _with_half_width(s.score),
            "-" if s.gain is None else _with_half_width(s.gain),
            "-" if s.win_rate is None else f"{s.win_rate.mean:.3f} [{s.win_rate.low:.3f}, {s.win_rate.high:.3f}]",
            "-" if s.length_controlled_win_rate is None else f"{s.length_controlled_win_rate:.3f}",
            _with_half_width(s.kl),
            f"{s.response_length:.1f}",
            f"{s.ended:.3f}",
            f"{s.distinct_2:.3f}",
            *(_samples(s.worth) for _ in best_of),
        )
        for s in results
    ]
    return f"against the baseline {results[0].policy}", columns, rows


def selection_tables(selected: Sequence[Selection], source: str | None) -> list[Table]:
    """Best-of-n by the source of --select-by; no table without one."""
    columns = ("policy", "n", "KL", "score", "gain", "share of the judge's own choice")
    rows: list[tuple[str, ...]] = [
        (
            s.policy,
            str(s.n),
            f"{s.kl:.2f}",
            _with_half_width(s.score),
            _with_half_width(s.gain),
            "-" if s.share is None else f"{s.share:.2f}",
        )
        for s in selected
    ]
    return [(f"the response that {source} selects among n", columns, rows)] if rows else []


def _samples(n: Interval | None) -> str:
    return "-" if n is None else f"{n.mean:.3g} [{n.low:.3g}, {n.high:.3g}]"


def _with_half_width(interval: Interval) -> str:
    return f"{interval.mean:.4g} ± {interval.half_width:.2g}"


def markdown(tables: Sequence[Table], note: str = NOTE) -> str:
    """The tables in Markdown, and a note on how to read them."""
    sections = []
    for title, columns, rows in tables:
        lines = [columns, tuple("---" for _ in columns), *rows]
        cells = ([" ".join(text.replace("|", "\\|").split()) for text in line] for line in lines)
        sections.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join([*sections, note]) + "\n"


def report_results(comparison: Comparison, responses: dict[str, Responses]) -> None:
    """Print the tables and a few responses; write all results if there is an output directory."""
    results = policy_results(responses)
    selected = [
        each
        for name, r in responses.items()
        if r.selector is not None
        for each in selections(name, r.selector, r.scores)
    ]
    result_tables = [table(results), *selection_tables(selected, comparison.options.select_by)]
    for title, columns, rows in result_tables:
        console.show_table(title, columns, rows)
    console.say(NOTE)
    k = comparison.options.samples
    questions = [last_question(row.prompt) for row in comparison.prompts.rows[::k]]
    rows = [
        (questions[n], *(f"{r.texts[n][0]}\n[{r.scores[n, 0]:.3g}]" for r in responses.values()))
        for n in range(min(comparison.options.sample_rows, len(questions)))
    ]
    console.show_table(f"the first of {k} responses, and its score", ("prompt", *responses), rows)
    if comparison.options.output is not None and collectives.is_main():
        _write(comparison, responses, results, selected, markdown(result_tables))


def _write(
    comparison: Comparison,
    responses: dict[str, Responses],
    results: list[PolicyResult],
    selected: list[Selection],
    page: str,
) -> None:
    """Write all files, results.json last: if it exists, the other files are complete."""
    output = Path(str(comparison.options.output))
    content = {
        "policies": [
            disk.json_value(asdict(s)) | {"path": model_path, "manifest_sha256": manifests.manifest_digest(model_path)}
            for s, model_path in zip(results, comparison.policies.values(), strict=True)
        ],
        "best_of_n": [disk.json_value(asdict(each)) for each in selected],
        "reference": comparison.reference,
        "prompts": len(comparison.prompts.rows) // comparison.options.samples,
        "prompts_sha256": hashlib.sha256(json.dumps(comparison.prompts.ids).encode()).hexdigest(),
        "options": comparison.options.model_dump(mode="json", exclude={"overwrite"}),
        "versions": manifests.versions(),
    }
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in sample_rows(comparison, responses))
    disk.write_text(output / "samples.jsonl", "".join(rows))
    disk.write_text(output / "results.md", page)
    disk.write_json(output / RESULTS, content)
    console.say(f"wrote {RESULTS}, results.md and samples.jsonl into {output}")


def sample_rows(comparison: Comparison, responses: dict[str, Responses]) -> list[Tree]:
    """One row for each prompt and sample, with the responses of all policies."""
    rows, template = [], Template(comparison.prompts.tokenizer)
    for n, row in enumerate(comparison.prompts.rows[:: comparison.options.samples]):
        prompt = template.prompt_text(row.prompt, row.variables)
        for k in range(comparison.options.samples):
            responses_by_policy = {
                name: {
                    "response": r.texts[n][k],
                    "score": r.scores[n, k].item(),
                    "kl": r.kl[n, k].item(),
                    "length": int(r.lengths[n, k]),
                    "ended": bool(r.ended[n, k]),
                    **({} if r.selector is None else {"selector": r.selector[n, k].item()}),
                }
                for name, r in responses.items()
            }
            rows.append({"prompt": prompt, "sample": k, "responses": responses_by_policy})
    return rows
