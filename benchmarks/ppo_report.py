"""The report of benchmarks/ppo_quality.py: rollouts of both systems into a CSV, tables and a picture."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page
from benchmarks.frontier import Curve, FrontierPoint, compare, statement

NAMES = {"ours": "ours", "trl": "TRL 1.12"}
ROLLOUTS = {"ours": "step3_ppo/rollouts-0.jsonl", "trl": "rollouts.jsonl"}
METRICS = {"ours": ("step3_ppo/metrics.jsonl", "seconds_iteration"), "trl": ("metrics.jsonl", "seconds")}
COLUMNS = (
    "system", "seed", "iteration", "true_score", "true_score_se", "kl", "kl_se", "learned_score", "response_length",
    "ended", "seconds",
)  # fmt: skip
"""true_score: mean of the judge, _se: its standard error. kl: k1, nats per response. length: tokens, EOS included."""

Key = tuple[str, int]
"""system, seed"""


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:  # splitlines would part a text at U+2028
        return [json.loads(line) for line in file]


def iteration_rows(key: Key, folder: Path) -> list[dict[str, Any]]:
    """A row of the CSV for each iteration of a run."""
    system, seed = key
    parts: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in read(folder / ROLLOUTS[system]):
        parts[row["iteration"]].append(row)
    name, seconds = METRICS[system]
    times = [row[seconds] for row in read(folder / name) if seconds in row]
    assert len(times) == len(parts), f"{folder}: {len(times)} iterations were timed, {len(parts)} have responses"
    return [
        {"system": system, "seed": seed, "iteration": number, **_means(rows), "seconds": round(times[number - 1], 2)}
        for number, rows in sorted(parts.items())
    ]


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    true = list(rows[0])[-1]  # the judge is the last score source
    columns = {name: np.array([row[name] for row in rows], dtype=float) for name in (true, "kl", "learned", "tokens")}
    error = {name: values.std(ddof=1) / math.sqrt(len(values)) for name, values in columns.items()}
    means = {
        "true_score": columns[true].mean(),
        "true_score_se": error[true],
        "kl": columns["kl"].mean(),
        "kl_se": error["kl"],
        "learned_score": columns["learned"].mean(),
        "response_length": columns["tokens"].mean(),
        "ended": np.mean([row["ended"] for row in rows]),
    }
    return {name: round(float(value), 5) for name, value in means.items()}


def require_same_prompts(folders: Mapping[Key, Path]) -> None:
    """Both systems must have responded to the same prompts in each iteration."""
    prompts_by_seed: dict[int, Any] = {}
    for (system, seed), folder in folders.items():
        rows = read(folder / ROLLOUTS[system])
        prompts = [(row["iteration"], row["prompt"]) for row in rows]
        known = prompts_by_seed.setdefault(seed, prompts)
        least = min(len(known), len(prompts))
        assert known[:least] == prompts[:least], f"{folder}: other prompts than those of the other system"


def curves(rows: list[dict[str, Any]]) -> dict[str, Curve]:
    """The points of each system."""
    curve_of = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        columns = [np.array([row[name] for row in own]) for name in ("seed", "iteration", "kl", "true_score")]
        curve_of[system] = Curve(*columns)
    return curve_of


def frontier_table(points: list[FrontierPoint]) -> list[str]:
    """Markdown."""
    lines = ["| KL | ours | TRL 1.12 | difference | ours is |", "|---|---|---|---|---|"]
    for p in points:
        own, other = (f"{value:.3f} ± {half:.3f}" for value, half in (p.ours, p.other))
        lines.append(f"| {p.kl:.2f} | {own} | {other} | {p.gain:+.3f} ± {p.gain_ci95:.3f} | {p.verdict} |")
    return lines


def course_table(curve_of: Mapping[str, Curve], rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: each system's first and last iterations, and what an iteration took."""
    lines = ["| system | seeds | iterations | true score, first 3 | last 3 | KL, last 3 | seconds an iteration |"]
    lines.append("|---|---|---|---|---|---|---|")
    for system, c in curve_of.items():
        early, late = c.iteration <= 3, c.iteration > c.iteration.max() - 3
        seconds = np.median([row["seconds"] for row in rows if row["system"] == system])
        lines.append(
            f"| {NAMES[system]} | {len(set(c.seed))} | {c.iteration.max()} | {c.score[early].mean():.3f} | "
            f"{c.score[late].mean():.3f} | {c.kl[late].mean():.2f} | {seconds:.0f} |"
        )
    return lines


def heldout_table(results: Path, folders: Mapping[Key, Path]) -> list[str]:
    """Markdown: the results of `rlhf evaluate` for every final policy: the judge's scores on the held-out prompts."""
    names = {str(folder): f"{NAMES[system]}, seed {seed}" for (system, seed), folder in folders.items()}
    lines = ["| policy | true score | KL | length |", "|---|---|---|---|"]
    for entry in json.loads(results.read_text(encoding="utf-8"))["policies"]:
        name = names.get(str(Path(entry["policy"]).parent), "SFT")
        score, kl = entry["score"], entry["kl"]
        lines.append(
            f"| {name} | {score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}] | {kl['mean']:.2f} "
            f"[{kl['low']:.2f}, {kl['high']:.2f}] | {entry['response_length']:.1f} |"
        )
    return lines


def plot(panels: Any, curve_of: Mapping[str, Curve]) -> None:
    """True score by iteration, KL by iteration, true score against KL. Line: mean of the seeds; band: all of them."""
    score, kl, both = panels
    points = compare(curve_of["ours"], curve_of["trl"]) if len(curve_of) == 2 else []
    for system, c in curve_of.items():
        steps = np.unique(c.iteration)
        for axes, values in ((score, c.score), (kl, c.kl)):
            mean, least, most = c.by_iteration(values)
            (line,) = axes.plot(steps, mean, label=NAMES[system])
            axes.fill_between(steps, least, most, alpha=0.2, color=line.get_color(), linewidth=0)
        both.plot(c.kl, c.score, "o", alpha=0.5, markersize=4, label=NAMES[system], color=line.get_color())
        fitted = [(p.ours if system == "ours" else p.other)[0] for p in points]
        both.plot([p.kl for p in points], fitted, linewidth=2, color=line.get_color())
    score.set(
        xlabel="iteration", ylabel="true score (the judge)", title="true score: mean of the seeds, and their range"
    )
    kl.set(xlabel="iteration", ylabel="KL to the SFT model, nats per response", title="KL")
    both.set(xlabel="KL to the SFT model, nats per response", ylabel="true score", title="each iteration of each seed")
    for axes in (score, kl, both):
        axes.grid(alpha=0.3)
        axes.legend()


def report(folders: Mapping[Key, Path], heldout: Path, results: Path, name: str) -> None:
    """NAME.csv, NAME.md and NAME.svg in `results`, from what is finished; the tables are printed too."""
    require_same_prompts(folders)
    rows = [row for key, folder in folders.items() for row in iteration_rows(key, folder)]
    if not rows:
        print("report: no run is finished")
        return
    results.mkdir(parents=True, exist_ok=True)
    page.write_csv(results / f"{name}.csv", COLUMNS, ([row[column] for column in COLUMNS] for row in rows))
    curve_of = curves(rows)
    lines = ["## Training", "", *course_table(curve_of, rows)]
    if len(curve_of) == 2:
        points = compare(curve_of["ours"], curve_of["trl"])
        lines += ["", "## True score at the same KL", "", statement(points), "", *frontier_table(points)]
    if heldout.is_file():
        lines += ["", "## Final policies on held-out prompts", "", *heldout_table(heldout, folders)]
    text = "\n".join(lines) + "\n"
    (results / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    page.draw(results / f"{name}.svg", (1, 3), (15, 4.2), lambda panels: plot(panels, curve_of))
    print(f"report: wrote {results}/{name}.*")
