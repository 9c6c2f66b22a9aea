"""`python -m benchmarks.algorithms`: the true score that each algorithm reaches on the demo, over several seeds.

All algorithms start from the same SFT and reward model of a seed, and get the same number of responses. Their settings
are configs/demo.yaml, changed by configs/algorithms/NAME.yaml. A run takes half a minute on one core, the models of a
seed take two minutes. A finished run is not repeated, so an interrupted call can be resumed; remove a run's directory
to repeat it. Only one process at a time may write to an --output-dir. Writes one row per run to
docs/results/algorithms.csv, and a table of the same rows to algorithms.md.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from pydantic import Field

from benchmarks import page
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo.yaml"
OVERLAYS = ROOT / "configs" / "algorithms"
NOTE = (
    "Gain: ± is half a 95 % interval over the held-out prompts. KL: nats a response. Seconds: by the clock, with "
    "whatever else the machine was doing."
)
RATIO_LIMIT = 1e-5
"""fp32: limit of the standard deviation of the first minibatch's ratio, and of its approx_kl"""


class Options(parser.Config):
    """Which runs, and their directories."""

    algorithms: tuple[str, ...] = Field(("ppo", "a2c", "reinforce", "rloo", "grpo"), min_length=1)
    """names in step3_ppo/algorithms/; configs/algorithms/NAME.yaml, if it exists, changes the demo's settings"""
    seeds: tuple[int, ...] = Field((0, 1, 2, 3, 4), min_length=1)
    """seeds of all three stages"""
    models: str = "runs/algorithms/models-{seed}"
    """directory of each seed's SFT and reward model, with {seed} in its name; trained if they do not exist"""
    output_dir: str = "runs/algorithms"
    """directory of the runs"""
    results: str = str(ROOT / "docs" / "results" / "algorithms.csv")
    """CSV file to write"""


@dataclass(frozen=True, slots=True)
class Result:
    """One run: true scores on held-out prompts, half the 95 % interval of the gain, KL in nats a response."""

    algorithm: str
    seed: int
    before: float
    after: float
    gain: float
    gain_ci95: float
    kl: float
    score: float
    distinct_2_before: float
    distinct_2: float
    first_ratio_std: float | None
    """None for an algorithm without a ratio"""
    first_approx_kl: float | None
    seconds: float

    @property
    def improved(self) -> bool:
        return self.gain - self.gain_ci95 > 0

    @property
    def starts_on_policy(self) -> bool:
        """Whether the first ratios were 1; without ratios they are."""
        return max(self.first_ratio_std or 0.0, self.first_approx_kl or 0.0) < RATIO_LIMIT


def settings(algorithm: str) -> list[str]:
    """The words of train.py's command line that choose an algorithm."""
    overlay = OVERLAYS / f"{algorithm}.yaml"
    if overlay.is_file():
        return ["--config", str(DEMO), str(overlay)]
    return ["--config", str(DEMO), "--ppo.algorithm", algorithm]


def make_models(directory: Path, seed: int) -> None:
    """Run steps 1 and 2 of the demo, unless they are finished."""
    if (directory / "step2_reward" / "manifest.json").is_file():
        return
    _train("--config", str(DEMO), "--steps", "1", "2", "--seed", str(seed), "--output-dir", str(directory))


def run(algorithm: str, seed: int, models: Path, directory: Path) -> Result:
    """Run step 3 from the models of a seed, unless it is finished. Returns its result."""
    manifest = directory / "step3_ppo" / "manifest.json"
    if not manifest.is_file():
        start = ("--ppo.actor-model", f"{models}/step1_sft", "--ppo.reward-model", f"{models}/step2_reward")
        common = ("--steps", "3", "--seed", str(seed), "--output-dir", str(directory))
        _train(*settings(algorithm), *common, *start)
    return read(algorithm, seed, manifest.parent)


def read(algorithm: str, seed: int, stage: Path) -> Result:
    """The result of a finished run from its manifest and metrics."""
    metrics = json.loads((stage / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    iterations = [row for row in rows if row["kind"] == "train"]
    return Result(
        algorithm=algorithm,
        seed=seed,
        before=metrics["eval_judge_before"],
        after=metrics["eval_judge"],
        gain=metrics["eval_judge"] - metrics["eval_judge_before"],
        gain_ci95=metrics["eval_judge_gain_ci95"],
        kl=metrics["eval_kl"],
        score=metrics["eval_score"],
        distinct_2_before=metrics["eval_distinct_2_before"],
        distinct_2=metrics["eval_distinct_2"],
        first_ratio_std=max((row["first_ratio_std"] for row in iterations if "first_ratio_std" in row), default=None),
        first_approx_kl=max(
            (abs(row["first_approx_kl"]) for row in iterations if "first_approx_kl" in row), default=None
        ),
        seconds=rows[-1]["seconds"],
    )


def _train(*words: str) -> None:
    process = subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if process.returncode != 0:
        raise UserError(f"train.py {' '.join(words)}: ended with exit code {process.returncode}")


def markdown(results: Sequence[Result]) -> str:
    """One row per run, and for each algorithm the number of seeds that improved."""
    lines = [
        "| algorithm | seed | true score before | after | gain | KL | distinct-2 before | after | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.algorithm} | {r.seed} | {r.before:.3f} | {r.after:.3f} | {r.gain:.3f} ± {r.gain_ci95:.3f} "
        f"| {r.kl:.2f} | {r.distinct_2_before:.3f} | {r.distinct_2:.3f} | {r.seconds:.0f} |"
        for r in results
    ]
    return "\n".join([*lines, "", *summary(results), "", NOTE]) + "\n"


def summary(results: Sequence[Result]) -> list[str]:
    """One line per algorithm, and one on the first minibatches of all."""
    lines = []
    for name in dict.fromkeys(r.algorithm for r in results):
        algorithm_results = [r for r in results if r.algorithm == name]
        gains = [r.gain for r in algorithm_results]
        improved = sum(r.improved for r in algorithm_results)
        below = sum(r.gain < 0 for r in algorithm_results)
        lines.append(
            f"- {name}: {improved} of {len(gains)} seeds improve, {below} below their start; "
            f"gain {min(gains):.3f} to {max(gains):.3f}, mean {sum(gains) / len(gains):.3f}"
        )
    ratios = [r.first_ratio_std for r in results if r.first_ratio_std is not None]
    kls = [r.first_approx_kl for r in results if r.first_approx_kl is not None]
    if not ratios or not kls:
        return lines
    ratio, kl = max(ratios), max(kls)
    return [*lines, f"- first minibatches: ratio std at most {ratio:.1e}, approx_kl {kl:.1e} (limit {RATIO_LIMIT:g})"]


def write(results: Sequence[Result], path: Path) -> None:
    """The CSV file, and the table beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ([f"{v:.6g}" if isinstance(v, float) else v for v in astuple(result)] for result in results)
    page.write_csv(path, [field.name for field in fields(Result)], rows)
    path.with_suffix(".md").write_text(markdown(results), encoding="utf-8")


def main() -> int:
    """Exit code 1 if a seed did not improve, or a first ratio was not 1."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.algorithms", "Algorithms on the demo world.")
    if "{seed}" not in options.models:
        raise UserError(f"--models {options.models}: expected {{seed}} in it, such as runs/demo-{{seed}}")
    results = []
    for algorithm in options.algorithms:
        for seed in options.seeds:
            models = Path(options.models.replace("{seed}", str(seed))).absolute()
            make_models(models, seed)
            directory = Path(options.output_dir).absolute() / f"{algorithm}-{seed}"
            results.append(run(algorithm, seed, models, directory))
            print(f"{algorithm} {seed}: gain {results[-1].gain:.3f} ± {results[-1].gain_ci95:.3f}", flush=True)
    write(results, Path(options.results))
    print(markdown(results), end="")
    passed = all(r.improved and r.starts_on_policy for r in results)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
