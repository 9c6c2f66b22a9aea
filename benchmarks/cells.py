"""Cells: step 3 with the options of a variant, from the models of a seed.

SFT and reward model are trained once for each seed and shared by all variants, except those that change an option of
steps 1 and 2. A finished cell is one JSON file.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.jobs import Job, JobOptions, file_name, run_jobs
from rlhf.config import read_yaml
from rlhf.errors import UserError
from rlhf.storage import disk

ROOT = Path(__file__).resolve().parents[1]


class CellOptions(JobOptions):
    """The recipe, the seeds, and the directories."""

    recipe: str = str(ROOT / "configs" / "recipes" / "stories260k-sentiment-cpu.yaml")
    """YAML file of a chain with a judge"""
    seeds: int = Field(8, ge=1)
    """seeds 0, 1, ...: of the models, the rows they learn from, and the sampling"""
    variants: str = str(ROOT / "benchmarks" / "variants" / "stories.yaml")
    """YAML file of the variants"""
    output_dir: str = "runs/ablations"
    """directory of models and finished cells"""
    name: str = "ablations"
    """name of the report's files"""

    def digest(self, *words: str) -> str:
        """Of the recipe's text and these words."""
        recipe = Path(self.recipe).read_text(encoding="utf-8")
        return hashlib.sha256(repr((recipe, words)).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Variant:
    """Options by a name: words of train.py's command line."""

    name: str
    words: tuple[str, ...]
    named: tuple["Variant", ...] = ()
    """variants of the same file whose reward models the words name, as in `--ppo.critic-model {NAME}`"""

    def words_but(self, *sections: str) -> tuple[str, ...]:
        """The words without the options of these sections: sft, reward, ppo."""
        groups: list[list[str]] = []
        for word in self.words:
            if word.startswith("--"):
                groups.append([])
            groups[-1].append(word)
        prefixes = tuple(f"--{section}." for section in sections)
        return tuple(word for group in groups if not group[0].startswith(prefixes) for word in group)


def read_variants(path: str) -> list[Variant]:
    """The variants of a YAML file, `name: options of train.py`, in its order.

    A word `{NAME}` is the directory of the reward model of the variant NAME, of the same seed.
    """
    words = {str(name): tuple(shlex.split(str(text or ""))) for name, text in read_yaml(path).items()}
    variants = []
    for name, options in words.items():
        references = [word[1:-1] for word in options if word.startswith("{")]
        variants.append(Variant(name, options, named=tuple(Variant(each, words[each]) for each in references)))
    return variants


@dataclass(frozen=True, slots=True)
class Cell:
    """A finished run: mean KL (nats a response) and mean true score of the responses of each iteration."""

    variant: str
    seed: int
    seconds: float
    """processor time, all of it"""
    metrics: Mapping[str, float]
    """the last evaluation on held-out prompts"""
    kl: tuple[float, ...] = ()
    score: tuple[float, ...] = ()


Measure = Callable[[Any, Any, int], Mapping[str, Any]]
"""(options, options of step 3, seed) -> what a Cell keeps of a finished step 3: metrics, and kl and score"""
Report = Callable[[Sequence[Cell], Sequence[str], Any], None]
"""(finished cells, names of all variants in their order, options)"""


def resolve_chain(words: Sequence[str]) -> Any:
    """All options of a run by a command line of train.py."""
    from rlhf.chain import command as train

    return train.read(list(words))


def model_directories(options: CellOptions, variant: Variant, seed: int) -> tuple[Path, Path]:
    """The directories of the variant's SFT model and reward model, which other variants may share."""
    folder = options.folder / "models"
    sft, reward = variant.words_but("reward", "ppo"), variant.words_but("ppo")
    return (
        folder / f"{seed}-{options.digest(*sft)}" / "step1_sft",
        folder / f"{seed}-{options.digest(*reward)}" / "step2_reward",
    )


def cell_file(options: CellOptions, variant: Variant, seed: int) -> Path:
    """The file of a finished cell: another one for other options under the same name."""
    digest = options.digest(*variant.words, *(word for other in variant.named for word in other.words))
    return options.folder / "cells" / f"{file_name(variant.name)}-{digest}-{seed}.json"


def train_model(options: CellOptions, variant: Variant, seed: int, directory: Path) -> None:
    """Step 1 or 2 of a variant, whose directory this is."""
    from step1_sft.stage import FINE_TUNING
    from step2_reward.stage import REWARD_MODELLING

    seeds = ("--seed", str(seed), "--data-seed", str(seed), "--output-dir", str(directory.parent))
    chain = resolve_chain(["--config", options.recipe, *seeds, *variant.words_but("ppo")])
    if directory.name == "step1_sft":
        FINE_TUNING.run(chain.sft)
    else:
        REWARD_MODELLING.run(chain.reward)


def step3_options(options: CellOptions, variant: Variant, seed: int) -> Any:
    """The options of step 3, with the judge as a reward source of weight 0."""
    directory = cell_file(options, variant, seed).with_suffix("")
    sft, reward = model_directories(options, variant, seed)
    seeds = ("--seed", str(seed), "--data-seed", str(seed), "--output-dir", str(directory))
    models = {f"{{{other.name}}}": str(model_directories(options, other, seed)[1]) for other in variant.named}
    ppo = resolve_chain(["--config", options.recipe, *seeds, *(models.get(word, word) for word in variant.words)]).ppo
    if ppo.judge is None:
        raise UserError(f"{options.recipe}: got no judge, expected one such as ppo.judge vader")
    changes = {
        "actor_model": ppo.actor_model or str(sft),
        "reward_model": ppo.reward_model or str(reward),
        "reward": (*ppo.reward, f"0*{ppo.judge}"),
    }
    return ppo.model_copy(update=changes)


def run_cell(options: CellOptions, variant: Variant, seed: int, measure: Measure) -> None:
    """Step 3 of a variant, in TRL if its name begins so; writes the cell and removes the run."""
    from benchmarks import trl_ppo
    from step3_ppo import stage

    ppo = step3_options(options, variant, seed)
    shutil.rmtree(ppo.output_dir, ignore_errors=True)
    start = sum(os.times()[:4])
    (trl_ppo.train if variant.name.startswith("TRL") else stage.run)(ppo)
    seconds = sum(os.times()[:4]) - start
    cell, path = Cell(variant.name, seed, seconds, **measure(options, ppo, seed)), cell_file(options, variant, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_json(path, asdict(cell))
    shutil.rmtree(ppo.output_dir)


def read_run(options: CellOptions, ppo: Any, seed: int) -> dict[str, Any]:
    """The metrics and curves of a finished step 3 here, whose last reward source is the judge."""
    stage = Path(ppo.output_dir) / "step3_ppo"
    with (stage / "metrics.jsonl").open(encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["kind"] == "train" and "kl" in row]
    judge = [name for name in rows[0] if name.startswith("score_") and f"{name}_std" in rows[0]][-1]
    curves = {name: tuple(row[column] for row in rows) for name, column in (("kl", "kl"), ("score", judge))}
    return {"metrics": json.loads((stage / "manifest.json").read_text(encoding="utf-8"))["metrics"], **curves}


def read_cell(path: Path) -> Cell:
    values = json.loads(path.read_text(encoding="utf-8"))
    return Cell(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def run_models(options: CellOptions, variants: Sequence[tuple[Variant, int]]) -> None:
    """Train the SFT and reward models of (variant, seed) that do not exist, each once."""
    jobs: dict[Path, Job] = {}
    for variant, seed in variants:
        for directory in model_directories(options, variant, seed):
            name, call = f"{directory.parent.name}-{directory.name}", partial(train_model, options, variant, seed)
            jobs.setdefault(directory, Job(name, partial(call, directory), directory / "manifest.json"))
    run_jobs(list(jobs.values()), options)


def run_grid(options: CellOptions, variants: Sequence[Variant], measure: Measure = read_run) -> list[Cell]:
    """The cells of all variants and seeds that are finished after this call; those of a seed one after the other, so
    that an interrupted call leaves whole seeds."""
    grid = {cell_file(options, each, seed): (each, seed) for seed in range(options.seeds) for each in variants}
    todo = [(variant, seed) for path, (variant, seed) in grid.items() if not path.is_file()]
    run_models(options, [(each, seed) for variant, seed in todo for each in (variant, *variant.named)])
    jobs = [
        Job(f"{variant.name}, seed {seed}", partial(run_cell, options, variant, seed, measure), path)
        for path, (variant, seed) in grid.items()
    ]
    run_jobs(jobs, options)
    return [read_cell(path) for path in grid if path.is_file()]


def report_grid(options: CellOptions, report: Report, measure: Measure = read_run) -> int:
    """Run the grid and report its cells. Returns 1 if a run failed, else 0. Raises: UserError if no run is finished."""
    variants = read_variants(options.variants)
    cells = run_grid(options, variants, measure)
    if not cells:
        raise UserError(f"{options.output_dir}: no run is finished; see {options.output_dir}/logs")
    report(cells, [variant.name for variant in variants], options)
    return 0 if len(cells) == len(variants) * options.seeds else 1


def by_variant(cells: Sequence[Cell], names: Sequence[str]) -> dict[str, list[Cell]]:
    """The cells of each variant that has some, in the order of `names`."""
    runs = {name: [cell for cell in cells if cell.variant == name] for name in names}
    return {name: some for name, some in runs.items() if some}
