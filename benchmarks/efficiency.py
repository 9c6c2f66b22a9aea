"""`python -m benchmarks.efficiency`: how much of the possible gain does a run reach, and what brings it closer?

Best-of-n of the SFT model comes close to the most that any policy gains at its KL (rlhf/maths/best_of_n.py). So a
policy is described by three numbers: its KL, the n whose best-of-n has its score ("worth the best of n"), and its
efficiency, which is its gain over that of best-of-n at the same KL. Both also by the judge, which no stage trains on:
best-of-n then still chooses by the score.

FILE of --variants is a YAML file of `name: options of train.py`, as of benchmarks.ablations; those whose name begins
with TRL run in its PPOTrainer. Each variant runs with every seed. Its policy gives some responses to each held-out
prompt, the SFT model of the same seed many. Variants end at different KLs, so they are compared along the straight line
of weights from the SFT model to the policy (`rlhf export --at`): the efficiency at 1, 2, 3 and 4 nats lies between
those of the two policies on the line that are next to it.

Writes NAME.csv (a row for each run), the table in NAME.md, and NAME.svg. Runs that are finished are not repeated.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from pydantic import Field

from benchmarks import cells, page
from benchmarks.cells import ROOT, Cell, CellOptions, Variant
from benchmarks.jobs import Job, run_jobs
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.maths import best_of_n
from rlhf.maths.intervals import mean_interval

NATS = (1, 2, 3, 4)
AT_NATS = tuple(f"efficiency_at_{nats}" for nats in NATS)
NUMBERS = ("kl", "score", "judge", "worth", "judge_worth", "efficiency", "judge_efficiency", *AT_NATS)
LINE = (0.25, 0.5, 0.75, 1.0, 1.5)
"""where on the line, from the SFT model, 0, to the tuned policy, 1"""
at = partial(np.interp, left=np.nan, right=np.nan)
"""at(x, xs, ys): y at x between rising points; NaN outside"""


class Options(CellOptions):
    """Which variants, and how many responses."""

    variants: str = str(ROOT / "benchmarks" / "variants" / "efficiency.yaml")
    """YAML file of the variants"""
    start_samples: int = Field(256, ge=2)
    """responses of the SFT model to each held-out prompt: as far as the curve of best-of-n goes"""
    policy_samples: int = Field(16, ge=2)
    """responses of each policy to each held-out prompt"""
    output_dir: str = "runs/efficiency"
    """directory of models and finished cells"""
    name: str = "efficiency"
    """name of the report's files"""

    def start(self, seed: int) -> Path:
        """The file of what the SFT model of a seed responds to the held-out prompts, which are beside it."""
        return self.folder / "start" / f"{seed}-{self.digest(str(self.start_samples))}" / "start.pt"


def respond(model: str, ppo: Any, prompts: Path, samples: int) -> dict[str, torch.Tensor]:
    """Responses of a model to the prompts: score, judge and KL to the SFT model, [N, K] each.

    ppo: options of step 3, which say how it samples and what it scores. score: with the penalty for no end
    """
    from rlhf.distributed import collectives
    from rlhf.evaluation import comparison
    from rlhf.evaluation.options import EvaluateConfig

    shared = {name: getattr(ppo, name) for name in ("response_length", "temperature", "chat_template", "dtype")}
    options = EvaluateConfig(
        policies=(model,),
        reference=ppo.actor_model,
        prompts=str(prompts),
        samples=samples,
        reward=ppo.judge,
        select_by=f"learned,model={ppo.reward_model}",
        rollout_batch_size=512,
        micro_batch_size=64,
        **shared,
    )
    with collectives.process_group(ppo.timeout_s):
        (found,) = comparison.measure_all(comparison.check(options)).values()
    assert found.selector is not None
    scores = found.selector - (ppo.missing_eos_penalty or 0.0) * (1 - found.ended)
    return {"score": scores, "judge": found.scores, "kl": found.kl}


def measure_start(options: Options, variant: Variant, seed: int) -> None:
    """Write the held-out prompts of a seed, and the responses of its SFT model to them."""
    from rlhf.text.messages import format_prompt
    from step3_ppo.inputs import check

    ppo, folder = cells.step3_options(options, variant, seed), options.start(seed).parent
    data = check(ppo).prompts
    folder.mkdir(parents=True, exist_ok=True)
    rows = (data.evaluation[i].row for i in range(min(len(data.evaluation), ppo.eval_samples)))
    lines = [json.dumps({"prompt": format_prompt(row.prompt)}) for row in rows]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    torch.save(respond(ppo.actor_model, ppo, folder / "prompts.jsonl", options.start_samples), options.start(seed))


def measure_policy(options: Options, ppo: Any, seed: int) -> dict[str, dict[str, float]]:
    """The metrics of a cell: NUMBERS of a tuned policy, those AT_NATS on the line to it.

    NaN: best-of-n has no gain at its KL, or the line does not have the nats.
    """
    from rlhf.chain.line import between
    from rlhf.storage.manifests import resolve_model_path

    reference = resolve_model_path(ppo.actor_model, "model")
    actor, line = Path(ppo.output_dir) / "step3_ppo" / "actor", []
    for position in LINE:
        path = actor.with_name(f"at-{position:g}")
        between(reference, str(actor), position, path)
        line.append(numbers_of(options, str(path), ppo, seed))
    tuned = line[LINE.index(1.0)]
    kls, efficiencies = [each["kl"] for each in line], [each["efficiency"] for each in line]
    return {"metrics": tuned | dict(zip(AT_NATS, at(NATS, kls, efficiencies).tolist(), strict=True))}


def numbers_of(options: Options, model: str, ppo: Any, seed: int) -> dict[str, float]:
    """KL, score, judge's score, worth and efficiency of a policy; NaN: best-of-n has no gain at its KL."""
    baseline = torch.load(options.start(seed))
    policy = respond(model, ppo, options.start(seed).with_name("prompts.jsonl"), options.policy_samples)
    numbers = {name: values.mean().item() for name, values in policy.items()}
    for prefix, by in (("", "score"), ("judge_", "judge")):
        gains = policy[by].mean(1) - baseline[by].mean(1)
        best = best_of_n.expected_gains(baseline["score"], baseline[by])
        efficiency = best_of_n.efficiency(gains, best, policy["kl"].mean(1))
        numbers[f"{prefix}worth"] = best_of_n.worth(gains, best).mean
        numbers[f"{prefix}efficiency"] = float("nan") if efficiency is None else efficiency.mean
    return numbers


def table(runs: Mapping[str, Sequence[Cell]]) -> list[str]:
    """Markdown: the mean of each number over the seeds; of the efficiencies with its interval."""
    head = ["variant", "seeds", "KL", "score", "judge", "worth the best of", "by the judge", "efficiency"]
    head += ["by the judge", *(f"at {nats} nats" for nats in NATS), "CPU s"]
    lines = []
    for name, own in runs.items():
        columns = {key: [cell.metrics[key] for cell in own] for key in NUMBERS}
        means = [f"{fmean(columns[key]):.{digits}f}" for key, digits in zip(NUMBERS, (2, 3, 3, 1, 1), strict=False)]
        efficiencies = [page.mean_text([x for x in columns[key] if isfinite(x)], 2) for key in NUMBERS[5:]]
        lines.append([name, len(own), *means, *efficiencies, f"{fmean(cell.seconds for cell in own):.0f}"])
    return page.table(head, lines)


def plot(axes: Any, runs: Mapping[str, Sequence[Cell]], responses: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """At 1 to 4 nats: the score of each variant beside best-of-n of the SFT models, and its efficiency with intervals.

    responses: by seed, as of `respond`
    """
    scores, efficiencies = axes
    curves = {seed: best_of_n.expected_scores(x["score"], x["score"]).mean(0).tolist() for seed, x in responses.items()}
    size = len(next(iter(curves.values())))
    kls = [best_of_n.kl(n) for n in range(1, size + 1)]
    mean = [fmean(values) for values in zip(*curves.values(), strict=True)]
    scores.plot(kls, mean, color="black", label="best of n of the SFT model")
    for n in best_of_n.sizes(size):
        scores.annotate(str(n), (kls[n - 1], mean[n - 1]), (0, 4), textcoords="offset points")
    for name, own in runs.items():
        columns = [[(cell.seed, x) for cell in own if isfinite(x := cell.metrics[key])] for key in AT_NATS]
        points = [(nats, column) for nats, column in zip(NATS, columns, strict=True) if len(column) > 1]
        reached = [
            fmean(curves[seed][0] + x * (at(nats, kls, curves[seed]) - curves[seed][0]) for seed, x in column)
            for nats, column in points
        ]
        scores.plot([x for x, _ in points], reached, "o-", label=name)
        nats, intervals = [x for x, _ in points], [mean_interval(torch.tensor([x for _, x in c])) for _, c in points]
        bars = [each.half_width for each in intervals]
        efficiencies.errorbar(nats, [each.mean for each in intervals], bars, capsize=3, fmt="o-")
    scores.set(ylabel="score, mean of held-out prompts")
    efficiencies.axhline(1.0, color="black")
    efficiencies.set(ylabel="gain, as a share of that of best-of-n", ylim=(0, 1.1))
    for panel in axes:
        panel.set(xlabel="KL to the SFT model, nats per response")
        panel.grid(alpha=0.3)
    scores.legend(fontsize=8)


def report(finished: Sequence[Cell], names: Sequence[str], options: Options) -> None:
    """Write NAME.csv, the table of NAME.md, and NAME.svg. names: all variants, in their order."""
    runs, path = cells.by_variant(finished, names), Path(options.results) / options.name
    rows = [[c.variant, c.seed, *(f"{c.metrics[name]:.5g}" for name in NUMBERS), f"{c.seconds:.4g}"] for c in finished]
    page.write(path, ["variant", "seed", *NUMBERS, "cpu_seconds"], rows, table(runs))
    responses = {seed: torch.load(options.start(seed)) for seed in sorted({c.seed for c in finished})}
    page.draw(path, (14, 5.5), lambda axes: plot(axes, runs, responses))


def main() -> int:
    """Exit code 1 if a run failed."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.efficiency", "How much of the possible?")
    variants = cells.read_variants(options.variants)
    cells.run_models(options, [(variant, seed) for seed in range(options.seeds) for variant in variants])
    starts = [
        Job(
            f"best of n, seed {seed}",
            partial(measure_start, options, variants[0], seed),
            options.start(seed),
        )
        for seed in range(options.seeds)
    ]
    if not run_jobs(starts, options):
        raise UserError(f"{options.output_dir}: the SFT model was not measured; see the logs named above")
    return cells.report_grid(options, report, measure_policy)


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
