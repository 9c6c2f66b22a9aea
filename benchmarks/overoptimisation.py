"""`python -m benchmarks.overoptimisation`: how a policy overfits its reward model, after Gao et al. 2023 (2210.10760).

Reward models learn from few and from many pairs, which a gold reward model has labelled (benchmarks.gold_model).
Best-of-n sampling and PPO without a KL penalty maximise each of them, and the gold model gives the true score. With
d = sqrt(KL to the SFT policy), the gain in true score is, by their equation 1,

    best of n:  d (alpha - beta d),        KL = ln n - (n - 1) / n
    RL:         d (alpha - beta ln d)

Both are linear in alpha and beta, which least squares fits to each seed. With the reward model of the middle size, PPO
also runs with the means against over-optimisation (REMEDIES). Intervals: Student's t over the seeds. Writes
overoptimisation.csv (every point), the table in overoptimisation.md, and overoptimisation.svg. What is finished is not
repeated.
"""

import csv
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from benchmarks import gold_model
from benchmarks.ablations import write_table
from benchmarks.cells import (
    Cell,
    CellOptions,
    Job,
    Variant,
    model_directories,
    resolve_chain,
    run_grid,
    run_jobs,
    run_models,
)
from rlhf import errors
from rlhf.config import parser
from rlhf.maths import best_of_n
from rlhf.maths.intervals import Interval, mean_interval

WINDOW = 2
"""iterations of PPO whose mean is one point"""
BEST_OF_N = "best of n"
REMEDIES = {"KL penalty": "--ppo.kl-coef 0.1", "PAR": "--ppo.reference-responses 4"}
"""options of PPO that may move the peak, by their names"""


class Options(CellOptions):
    """Sizes of the reward models' data, of best-of-n and of PPO."""

    pairs: tuple[int, ...] = Field((100, 400, 1400), min_length=1)
    """pairs that the reward models learn from, the same number of steps: few pairs are read several times"""
    seeds: int = Field(3, ge=2)
    """seeds 0, 1, ... of models, rows and sampling"""
    best_of: int = Field(256, ge=2)
    """largest n; each prompt gets as many responses of the SFT policy"""
    prompts: int = Field(64, ge=1)
    """prompts of best-of-n"""
    episodes: int = Field(1024, ge=1)
    """responses of PPO"""
    ppo: str = "--ppo.kl-coef 0 --ppo.learning-rate 1e-3"
    """options of PPO, as of train.py"""
    epochs: int = Field(2, ge=1)
    """passes of the reward models over the most pairs; all train for as many steps"""
    gold: str = "build/gold"
    """directory of the gold reward model, which is trained if it does not exist"""
    output_dir: str = "runs/overoptimisation"
    """directory of models and finished parts"""
    results: str = "docs/results"
    """directory of the report"""


@dataclass(frozen=True, slots=True)
class Points:
    """Of one seed and reward model: where each policy is. All [N]."""

    method: str
    """best of n, PPO, or PPO with the name of a remedy"""
    pairs: int
    seed: int
    kl: np.ndarray
    """nats per response"""
    gold: np.ndarray
    """gain in true score over the SFT policy"""
    proxy: np.ndarray
    """the reward model's score"""


@dataclass(frozen=True, slots=True)
class Law:
    """gain(d) = d (alpha - beta f(d)), f(d) = d for best of n and ln d for RL."""

    logarithmic: bool
    alpha: float
    beta: float
    r2: float = math.nan
    """share of the variance of the gains that it explains"""

    def gain(self, d: np.ndarray) -> np.ndarray:
        return d * (self.alpha - self.beta * (np.log(d) if self.logarithmic else d))

    @property
    def peak(self) -> tuple[float, float]:
        """(d, gain) of the maximum; infinite without over-optimisation, which is beta <= 0."""
        if self.beta <= 0:
            return math.inf, math.inf
        d = math.exp(self.alpha / self.beta - 1) if self.logarithmic else self.alpha / (2 * self.beta)
        return d, float(self.gain(np.array(d)))


def fit(d: np.ndarray, gain: np.ndarray, logarithmic: bool) -> Law:
    """Least squares over the points with d > 0."""
    d, gain = d[d > 0], gain[d > 0]
    design = np.stack([d, -d * (np.log(d) if logarithmic else d)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(design, gain, rcond=None)
    residual = gain - design @ np.array([alpha, beta])
    return Law(logarithmic, float(alpha), float(beta), float(1 - residual.var() / gain.var()))


def variants(options: Options) -> dict[Variant, tuple[str, int]]:
    """The method and the pairs of each PPO: from the reward model of each size, and with the remedies."""

    def words(pairs: int, remedy: str = "") -> tuple[str, ...]:
        passes = options.epochs * math.ceil(max(options.pairs) / pairs)
        rows = f"--reward.max-train-rows {pairs} --reward.num-train-epochs {passes}"
        return tuple(f"{rows} {options.ppo} --ppo.total-episodes {options.episodes} {remedy}".split())

    middle = sorted(options.pairs)[len(options.pairs) // 2]
    found = {Variant(f"{pairs} pairs", words(pairs)): ("PPO", pairs) for pairs in options.pairs}
    for name, remedy in REMEDIES.items():
        found[Variant(f"{middle} pairs, {name}", words(middle, remedy))] = f"PPO, {name}", middle
    return found


def reward_variants(options: Options) -> list[Variant]:
    """One variant for each size."""
    return list(variants(options))[: len(options.pairs)]


def sample_file(options: Options, seed: int) -> Path:
    return Path(options.output_dir).absolute() / f"best-of-{options.best_of}-{options.prompts}-{seed}.json"


def sample(options: Options, seed: int) -> None:
    """Responses of the SFT policy of a seed, scored by the judge and by every reward model; writes `sample_file`."""
    from rlhf import rewards
    from rlhf.config.options import PromptFileOptions
    from rlhf.evaluation.batch_generation import PromptSet, common_tokenizer, generation_setup
    from rlhf.text.prompt_file import read_prompts
    from rlhf.text.tokenizer import Template

    ppo = resolve_chain(options.words).ppo
    directories = [model_directories(options, variant, seed) for variant in reward_variants(options)]
    policy_path = str(directories[0][0] / "model")
    prompts = [row for _, row in read_prompts(ppo.ppo_only_data_path[0])[: options.prompts]]
    rows = tuple(row for row in prompts for _ in range(options.best_of))
    tokenizer = common_tokenizer([policy_path], "auto")
    ids = Template(tokenizer).prompt_ids_many([row.prompt for row in prompts])
    repeated = tuple(each for each in ids for _ in range(options.best_of))
    settings = PromptFileOptions(
        seed=seed, response_length=ppo.response_length, temperature=ppo.temperature, dtype="fp32",
        rollout_batch_size=512,
    )  # fmt: skip
    prompt_set = PromptSet(settings, tokenizer, rows, repeated)
    setup = generation_setup(prompt_set)
    policy, backend = setup.load(policy_path), setup.backend()
    sources = [setup.source(str(ppo.judge), 128)]
    sources += [setup.source(f"learned,model={reward}", 128) for _, reward in directories]
    scores: list[list[float]] = [[] for _ in sources]
    for batch, uniforms in prompt_set.batches():
        samples = rewards.as_samples(backend(policy.lm, batch, settings, uniforms), tokenizer)
        for column, source in zip(scores, sources, strict=True):
            column += source(samples).tolist()
    result = {"gold": scores[0]} | dict(zip(map(str, options.pairs), scores[1:], strict=True))
    path = sample_file(options, seed)
    path.with_suffix(".tmp").write_text(json.dumps(result), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def best_of_n_points(options: Options, seed: int) -> tuple[list[Points], float, dict[int, float]]:
    """(points of each reward model, mean true score of the SFT policy, agreement of each model with the judge)."""
    stored = json.loads(sample_file(options, seed).read_text(encoding="utf-8"))
    gold = torch.tensor(stored.pop("gold"), dtype=torch.float64).reshape(options.prompts, options.best_of)
    ns = [2**power for power in range(1, int(math.log2(options.best_of)) + 1)]
    points, agreements = [], {}
    for pairs in options.pairs:
        proxy = torch.tensor(stored[str(pairs)], dtype=torch.float64).reshape(gold.shape)
        means = np.array([[best_of_n.expected_score(proxy, of, n).mean().item() for of in (gold, proxy)] for n in ns])
        kl = np.array([best_of_n.kl(n) for n in ns])
        gain = means[:, 0] - gold.mean().item()
        points.append(Points(BEST_OF_N, pairs, seed, kl, gain, means[:, 1] - proxy.mean().item()))
        agreements[pairs] = agreement(proxy, gold)
    return points, gold.mean().item(), agreements


def agreement(proxy: Tensor, gold: Tensor) -> float:
    """Share of pairs of responses to one prompt, of different true scores, that the reward model orders as the judge.

    proxy, gold [P, K]; response j is paired with j + K / 2.
    """
    half = proxy.shape[1] // 2
    signs = [torch.sign(scores[:, :half] - scores[:, half : 2 * half]) for scores in (proxy, gold)]
    different = signs[1] != 0
    return (signs[0] == signs[1])[different].double().mean().item()


def ppo_points(cell: Cell, method: str, pairs: int, start: float) -> Points:
    """Means of WINDOW iterations of a run. start: true score of the SFT policy."""
    count = len(cell.kl) // WINDOW * WINDOW
    kl, gold, proxy = (
        np.array(values[:count]).reshape(-1, WINDOW).mean(1) for values in (cell.kl, cell.score, cell.reward)
    )
    return Points(method, pairs, cell.seed, kl.clip(0), gold - start, proxy - cell.reward[0])


def methods() -> list[str]:
    """In the order of the table."""
    return [BEST_OF_N, "PPO", *(f"PPO, {name}" for name in REMEDIES)]


def laws(points: Sequence[Points], method: str, pairs: int) -> list[Law]:
    """The fit of each seed."""
    own = [p for p in points if (p.method, p.pairs) == (method, pairs)]
    return [fit(np.sqrt(p.kl), p.gold, method != BEST_OF_N) for p in own]


def interval(values: Sequence[float]) -> Interval:
    return mean_interval(torch.tensor(values, dtype=torch.float64))


def table(points: Sequence[Points], agreements: Mapping[int, Sequence[float]], options: Options) -> list[str]:
    """Markdown: a row for each method and size."""
    lines = [
        "| method | pairs | agreement with the judge | alpha | beta | R² | largest gain measured | at KL "
        "| gain at the end | end KL |",
        "|---" * 10 + "|",
    ]
    for method in methods():
        for pairs in options.pairs:
            fits = laws(points, method, pairs)
            if not fits:
                continue
            own = [p for p in points if (p.method, p.pairs) == (method, pairs)]
            alpha, beta = (_text(interval([getattr(law, name) for law in fits])) for name in ("alpha", "beta"))
            best = [(p.gold.max(), p.kl[p.gold.argmax()], p.gold[-1], p.kl[-1]) for p in own]
            columns = list(zip(*best, strict=True))
            r2 = np.mean([law.r2 for law in fits])
            lines.append(
                f"| {method} | {pairs} | {np.mean(agreements[pairs]):.3f} | {alpha} | {beta} | {r2:.2f} "
                f"| {_text(interval(columns[0]))} | {np.mean(columns[1]):.1f} "
                f"| {_text(interval(columns[2]))} | {np.mean(columns[3]):.1f} |"
            )
    return lines


def _text(i: Interval) -> str:
    return f"{i.mean:.3f} ± {(i.high - i.low) / 2:.3f}"


def write_csv(path: Path, points: Sequence[Points]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "pairs", "seed", "kl", "gold_gain", "proxy_gain"])
        for p in points:
            for row in zip(p.kl, p.gold, p.proxy, strict=True):
                writer.writerow([p.method, p.pairs, p.seed, *(f"{value:.5g}" for value in row)])


def draw(path: Path, points: Sequence[Points], options: Options) -> None:
    """Gain in true score against sqrt(KL), and the mean of the seeds' laws. Raises: ModuleNotFoundError."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": path.name}  # text as text, the same bytes each time
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(17, 4.8), layout="constrained")
    middle = sorted(options.pairs)[len(options.pairs) // 2]
    sizes = [(f"{pairs} pairs", pairs) for pairs in options.pairs]
    lines = [[(label, BEST_OF_N, pairs) for label, pairs in sizes], [(label, "PPO", pairs) for label, pairs in sizes]]
    lines.append([(method, method, middle) for method in methods()[1:]])
    titles = ("best of n: d (alpha - beta d)", "PPO: d (alpha - beta ln d)", f"PPO from {middle} pairs")
    for axes, parts, title in zip(panels, lines, titles, strict=True):
        for label, method, pairs in parts:
            own, fits = [p for p in points if (p.method, p.pairs) == (method, pairs)], laws(points, method, pairs)
            if not own:
                continue
            d, gain = (np.concatenate(values) for values in ([np.sqrt(p.kl) for p in own], [p.gold for p in own]))
            (line,) = axes.plot(d, gain, ".", alpha=0.35)
            grid = np.linspace(0.02, d.max(), 100)
            axes.plot(grid, np.mean([law.gain(grid) for law in fits], axis=0), color=line.get_color(), label=label)
        axes.set(xlabel="d = sqrt(KL to the SFT policy, nats)", ylabel="gain in true score", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def report(points: Sequence[Points], agreements: Mapping[int, Sequence[float]], options: Options) -> None:
    """Write overoptimisation.csv, the table of the page overoptimisation.md, and overoptimisation.svg."""
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    write_csv(results / "overoptimisation.csv", points)
    write_table(results / "overoptimisation.md", table(points, agreements, options))
    try:
        draw(results / "overoptimisation.svg", points, options)
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; pip install matplotlib")


def main() -> int:
    """Exit code 1 if a run failed."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.overoptimisation", "Over-optimisation.")
    gold_model.prepare(options, Path(options.gold))
    words = shlex.join(gold_model.judge_words(Path(options.gold)))
    options = options.model_copy(update={"options": f"{options.options} {words}"})
    run_models(options, [(variant, seed) for seed in range(options.seeds) for variant in reward_variants(options)])
    logs = Path(options.output_dir).absolute() / "logs"
    jobs = [
        Job(f"best of n, seed {seed}", partial(sample, options, seed), logs / f"sample-{seed}.log")
        for seed in range(options.seeds)
        if not sample_file(options, seed).is_file()
    ]
    failed: list[Any] = run_jobs(jobs, options.processes)
    cells = run_grid(options, list(variants(options)))
    points, agreements = collect(options, cells)
    report(points, agreements, options)
    return 1 if failed or len(cells) < len(variants(options)) * options.seeds else 0


def collect(options: Options, cells: Sequence[Cell]) -> tuple[list[Points], dict[int, list[float]]]:
    """(all points of the seeds whose responses are scored; each seed's agreement with the judge, by size)."""
    by_name = {variant.name: method for variant, method in variants(options).items()}
    points: list[Points] = []
    agreements: dict[int, list[float]] = {pairs: [] for pairs in options.pairs}
    for seed in range(options.seeds):
        if sample_file(options, seed).is_file():
            own, start, shares = best_of_n_points(options, seed)
            points += own + [ppo_points(cell, *by_name[cell.variant], start) for cell in cells if cell.seed == seed]
            for pairs, share in shares.items():
                agreements[pairs].append(share)
    return points, agreements


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
