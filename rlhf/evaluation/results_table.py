"""How policies stand against the baseline: numbers, tables, and the files that hold them."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf import console
from rlhf.errors import UserError
from rlhf.evaluation.comparison import RESULTS, Responses, Setting
from rlhf.maths.intervals import Interval, mean_interval, win_fractions, win_rate_interval
from rlhf.storage import disk, manifests
from rlhf.text.tokenizer import Template

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""title, column names, rows"""

NOTE = (
    "Intervals are 95 %, over prompts. Score, gain and KL: Student's t of the prompts' means. Win rate: pairs of "
    "different draws, a tie one half, and the t interval with one prompt won and one lost added (after Bonett & Price "
    "2012). KL: k1, nats per response. Perplexity: per token, under the reference, at the sampling temperature."
)


@dataclass(frozen=True, slots=True)
class Standing:
    """What is said of one policy. Lengths in tokens, EOS included; KL in nats per response, NLL in nats per token."""

    policy: str
    score: Interval
    gain: Interval | None
    """score less the baseline's, prompt by prompt; None of the baseline"""
    win_rate: Interval | None
    """against the baseline; None of the baseline"""
    kl: Interval
    response_length: float
    ended: float
    """share of the responses that closed with EOS"""
    ref_nll: float
    """of a token under the reference; perplexity is its exponential"""
    perplexity: float
    distinct_2: float


def standings(responses: dict[str, Responses]) -> list[Standing]:
    """Every policy, in the order given; the first is the baseline."""
    baseline = next(iter(responses.values()))
    return [_standing(name, r, None if r is baseline else baseline) for name, r in responses.items()]


def _standing(name: str, own: Responses, baseline: Responses | None) -> Standing:
    gain = win_rate = None
    if baseline is not None:
        gain = mean_interval(own.scores.mean(1) - baseline.scores.mean(1))
        win_rate = win_rate_interval(win_fractions(own.scores, baseline.scores, _same(own, baseline)))
    nll = (own.ref_nll.sum() / own.lengths.sum()).item()
    return Standing(
        policy=name,
        score=mean_interval(own.scores.mean(1)),
        gain=gain,
        win_rate=win_rate,
        kl=mean_interval(own.kl.mean(1)),
        response_length=own.lengths.mean().item(),
        ended=own.ended.mean().item(),
        ref_nll=nll,
        perplexity=math.exp(nll) if nll < 700 else math.inf,
        distinct_2=distinct(own.tokens, 2),
    )


def _same(one: Responses, other: Responses) -> Tensor:
    """[N, K, K] whether response j of one and l of the other have the same text and both ended, or neither."""
    sides = [list(zip(r.texts, r.ended.tolist(), strict=True)) for r in (one, other)]
    rows = []
    for (own, own_ended), (others, others_ended) in zip(*sides, strict=True):
        there = list(zip(others, others_ended, strict=True))
        rows.append([[mine == theirs for theirs in there] for mine in zip(own, own_ended, strict=True)])
    return torch.tensor(rows)


def distinct(responses: Sequence[Sequence[int]], n: int) -> float:
    """Share of different n-grams among all n-grams of the responses (Li et al. 2016, arXiv 1510.03055)."""
    grams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def on_frontier(one: Standing, others: Sequence[Standing]) -> bool:
    """Whether no policy has a higher score at no more KL, or as high a score at less."""
    return not any(
        (other.kl.mean <= one.kl.mean and other.score.mean > one.score.mean)
        or (other.kl.mean < one.kl.mean and other.score.mean >= one.score.mean)
        for other in others
    )


def tables(found: list[Standing]) -> list[Table]:
    """The policies as they were given, and score against KL in the order of KL."""
    columns = (
        "policy", "score", "gain", "win rate", "KL", "length", "ended", "perplexity", "distinct-2",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            s.policy,
            _half(s.score),
            "-" if s.gain is None else _half(s.gain),
            "-" if s.win_rate is None else f"{s.win_rate.mean:.3f} [{s.win_rate.low:.3f}, {s.win_rate.high:.3f}]",
            _half(s.kl),
            f"{s.response_length:.1f}",
            f"{s.ended:.3f}",
            f"{s.perplexity:.4g}",
            f"{s.distinct_2:.3f}",
        )
        for s in found
    ]
    by_kl = sorted(found, key=lambda s: s.kl.mean)
    bought: list[tuple[str, ...]] = [
        (_half(s.kl), _half(s.score), "yes" if on_frontier(s, found) else "no", s.policy) for s in by_kl
    ]
    return [
        (f"against the baseline {found[0].policy}", columns, rows),
        ("score against KL", ("KL", "score", "on the frontier", "policy"), bought),
    ]


def _half(interval: Interval) -> str:
    return f"{interval.mean:.4g} ± {(interval.high - interval.low) / 2:.2g}"


def markdown(found: Sequence[Table]) -> str:
    """The tables, and a note on how to read them."""
    parts = []
    for title, columns, rows in found:
        lines = [columns, tuple("---" for _ in columns), *rows]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines))
    return "\n\n".join([*parts, NOTE]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def tell(setting: Setting, responses: dict[str, Responses]) -> None:
    """Print tables and a few responses side by side; write all of it if an output directory is named."""
    found = standings(responses)
    shown = tables(found)
    for title, columns, rows in shown:
        console.show_table(title, columns, rows)
    console.say(NOTE)
    k, asked = setting.options.samples, prompt_texts(setting)
    rows = [
        (asked[n], *(f"{r.texts[n][0]}\n[{r.scores[n, 0]:.3g}]" for r in responses.values()))
        for n in range(min(setting.options.sample_rows, len(asked)))
    ]
    console.show_table(f"the first of {k} responses, and its score", ("prompt", *responses), rows)
    if setting.options.output is not None:
        _write(Path(setting.options.output), setting, responses, found, markdown(shown))


def prompt_texts(setting: Setting) -> list[str]:
    """[N] the rendered prompts."""
    template = Template(setting.questions.tokenizer)
    return [template.prompt_text(row.prompt) for row in setting.questions.rows[:: setting.options.samples]]


def _write(output: Path, setting: Setting, responses: dict[str, Responses], found: list[Standing], page: str) -> None:
    """results.json last: where it stands, the others are whole. Raises: UserError if nothing can be written there."""
    results = {
        "policies": [
            _plain(asdict(s)) | {"place": place, "manifest_sha256": manifests.manifest_digest(place)}
            for s, place in zip(found, setting.policies.values(), strict=True)
        ],
        "reference": setting.reference,
        "prompts": len(setting.questions.rows) // setting.options.samples,
        "prompts_sha256": hashlib.sha256(Path(str(setting.options.prompts)).read_bytes()).hexdigest(),
        "options": setting.options.model_dump(mode="json", exclude={"overwrite"}),
        "versions": manifests.versions(),
    }
    try:
        with (output / "samples.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in sample_rows(setting, responses))
        (output / "results.md").write_text(page, encoding="utf-8")
        disk.write_json(output / RESULTS, results)
    except OSError as error:
        raise UserError(
            f"--output {output}: cannot be written ({error.strerror}); make room there and run again"
        ) from None
    console.say(f"wrote {RESULTS}, results.md and samples.jsonl into {output}")


def sample_rows(setting: Setting, responses: dict[str, Responses]) -> list[dict[str, Any]]:
    """Every prompt, and the responses of all policies to it side by side."""
    rows = []
    for n, prompt in enumerate(prompt_texts(setting)):
        for k in range(setting.options.samples):
            said = {
                name: {
                    "response": r.texts[n][k],
                    "score": r.scores[n, k].item(),
                    "kl": r.kl[n, k].item(),
                    "length": int(r.lengths[n, k]),
                    "ended": bool(r.ended[n, k]),
                }
                for name, r in responses.items()
            }
            rows.append({"prompt": prompt, "sample": k, "responses": said})
    return rows


def _plain(value: Any) -> Any:
    """With None for infinity, which JSON has not."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
