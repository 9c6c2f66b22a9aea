"""Many short runs of one recipe: a cell is step 3 with the options of a variant, from the models of a seed.

Step 3 of a small model takes seconds, the imports before it as long. So one process imports everything, and forks
itself for every cell, with one thread each. SFT and reward model are trained once for each seed and shared by all
variants, except those that change an option of steps 1 and 2. A finished cell is one JSON file, and is not repeated.
"""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from rlhf.config import Config, read_yaml
from rlhf.errors import UserError
from rlhf.storage import disk
from rlhf.training.stage_process import fast_imports

ROOT = Path(__file__).resolve().parents[1]


class CellOptions(Config):
    """The recipe, the seeds, and the directories."""

    recipe: str = str(ROOT / "configs" / "recipes" / "stories260k-sentiment-cpu.yaml")
    """YAML file of a chain with a judge"""
    options: str = ""
    """more options of train.py for all runs, as one word: "--actor-model DIR --reward-model DIR" """
    seeds: int = Field(8, ge=1)
    """seeds 0, 1, ...: of the models, the rows they learn from, and the sampling"""
    processes: int = Field(2, ge=1)
    """cells at the same time, each with one thread"""
    output_dir: str = "runs/ablations"
    """directory of models and finished cells"""

    @property
    def words(self) -> list[str]:
        """The words of train.py's command line that all runs share."""
        return ["--config", self.recipe, *shlex.split(self.options)]

    def digest(self, *words: str) -> str:
        """Of the recipe's text, the options of all runs, and these words."""
        recipe = Path(self.recipe).read_text(encoding="utf-8")
        return hashlib.sha256(repr((recipe, self.options, words)).encode()).hexdigest()[:8]


GridOptions = TypeVar("GridOptions", bound=CellOptions)


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
    Raises: UserError if the file has no variant, one whose options do not begin with `--`, or a NAME that it lacks.
    """
    words = {str(name): tuple(shlex.split(str(text or ""))) for name, text in read_yaml(path).items()}
    if not words:
        raise UserError(f"{path}: got no variant, expected lines such as `lam 1: --ppo.lam 1`")
    variants = []
    for name, options in words.items():
        if options and not options[0].startswith("--"):
            raise UserError(f"{path}: {name}: got '{options[0]}', expected options such as --ppo.lam 1")
        references = [word[1:-1] for word in options if word.startswith("{")]
        for unknown in (reference for reference in references if reference not in words):
            raise UserError(f"{path}: {name}: got '{{{unknown}}}', expected a name of the file: {', '.join(words)}")
        variants.append(Variant(name, options, named=tuple(Variant(each, words[each]) for each in references)))
    return variants


@dataclass(frozen=True, slots=True)
class Cell:
    """A finished run: mean KL (nats a response) and mean true score of the responses of each iteration."""

    variant: str
    seed: int
    kl: tuple[float, ...]
    score: tuple[float, ...]
    reward: tuple[float, ...]
    """the score that the run maximised"""
    metrics: Mapping[str, float]
    """the last evaluation on held-out prompts"""
    seconds: float
    """processor time, all of it"""


def resolve_chain(words: Sequence[str]) -> Any:
    """All options of a run by a command line of train.py."""
    from rlhf.chain import command as train

    return train.read(list(words))


def model_directories(options: CellOptions, variant: Variant, seed: int) -> tuple[Path, Path]:
    """The directories of the variant's SFT model and reward model, which other variants may share."""
    folder = Path(options.output_dir).absolute() / "models"
    sft, reward = variant.words_but("reward", "ppo"), variant.words_but("ppo")
    return (
        folder / f"{seed}-{options.digest(*sft)}" / "step1_sft",
        folder / f"{seed}-{options.digest(*reward)}" / "step2_reward",
    )


def cell_file(options: CellOptions, variant: Variant, seed: int) -> Path:
    """The file of a finished cell: another one for other options under the same name."""
    digest = options.digest(*variant.words, *(word for other in variant.named for word in other.words))
    return Path(options.output_dir).absolute() / "cells" / f"{_file_name(variant.name)}-{digest}-{seed}.json"


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in name)


def train_model(options: CellOptions, variant: Variant, seed: int, directory: Path) -> None:
    """Step 1 or 2 of a variant, whose directory this is."""
    from step1_sft.stage import FINE_TUNING
    from step2_reward.stage import REWARD_MODELLING

    seeds = ("--seed", str(seed), "--data-seed", str(seed), "--output-dir", str(directory.parent))
    chain = resolve_chain([*options.words, *seeds, *variant.words_but("ppo")])
    if directory.name == "step1_sft":
        FINE_TUNING.run(chain.sft)
    else:
        REWARD_MODELLING.run(chain.reward)


def run_cell(options: CellOptions, variant: Variant, seed: int) -> None:
    """Step 3 of a variant, with the judge as a reward source of weight 0; writes the cell and removes the run."""
    from step3_ppo import stage

    path = cell_file(options, variant, seed)
    ppo = step3_options(options, variant, seed)
    shutil.rmtree(ppo.output_dir, ignore_errors=True)
    start = time.process_time()
    stage.run(ppo)
    cell = read_run(variant.name, seed, Path(ppo.output_dir) / "step3_ppo", time.process_time() - start)
    write_cell(path, cell)
    shutil.rmtree(ppo.output_dir)


def step3_options(options: CellOptions, variant: Variant, seed: int) -> Any:
    """The options of step 3, with the judge as a reward source of weight 0."""
    directory = cell_file(options, variant, seed).with_suffix("")
    sft, reward = model_directories(options, variant, seed)
    seeds = ("--seed", str(seed), "--data-seed", str(seed), "--output-dir", str(directory))
    models = {f"{{{other.name}}}": str(model_directories(options, other, seed)[1]) for other in variant.named}
    ppo = resolve_chain([*options.words, *seeds, *(models.get(word, word) for word in variant.words)]).ppo
    if ppo.judge is None:
        raise UserError(f"{options.recipe}: got no judge, expected one such as ppo.judge vader")
    changes = {
        "actor_model": ppo.actor_model or str(sft),
        "reward_model": ppo.reward_model or str(reward),
        "reward": (*ppo.reward, f"0*{ppo.judge}"),
    }
    return ppo.model_copy(update=changes)


def read_run(variant: str, seed: int, stage: Path, seconds: float) -> Cell:
    """The cell of a finished step 3, whose last reward source is the judge."""
    metrics = json.loads((stage / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    with (stage / "metrics.jsonl").open(encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["kind"] == "train" and "kl" in row]
    judge = [name for name in rows[0] if name.startswith("score_") and f"{name}_std" in rows[0]][-1]
    columns = (tuple(row[name] for row in rows) for name in ("kl", judge, "score"))
    return Cell(variant, seed, *columns, metrics, seconds)


def write_cell(path: Path, cell: Cell) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_json(path, {name: getattr(cell, name) for name in Cell.__slots__})


def read_cell(path: Path) -> Cell:
    values = json.loads(path.read_text(encoding="utf-8"))
    return Cell(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class Job:
    """A function call in a process of its own, and the file of its output."""

    name: str
    call: Callable[[], None]
    log: Path


def run_jobs(jobs: Sequence[Job], processes: int) -> list[Job]:
    """Run the jobs in forks of this process, `processes` at a time. Returns those that failed."""
    if not jobs:
        return []
    with contextlib.redirect_stdout(sys.stderr), fast_imports():  # every fork has what is imported here
        import deepspeed  # noqa: F401
        import torch
        import transformers.models.llama.modeling_llama  # noqa: F401

        import data.sources.files  # noqa: F401
        import rlhf.chain.command
        import rlhf.generation.loop  # noqa: F401
        import step1_sft.stage  # noqa: F401
        import step2_reward.stage  # noqa: F401
        import step3_ppo.stage  # noqa: F401
    torch.set_num_threads(1)  # a fork has none of its parent's threads, so the parent must have started none
    gc.freeze()
    fork, failed = multiprocessing.get_context("fork"), []
    running: dict[Any, tuple[Any, Job, float]] = {}
    waiting = list(jobs)
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop(0)
            process = fork.Process(target=_in_child, args=(job,))
            process.start()
            running[process.sentinel] = process, job, time.monotonic()
        for sentinel in connection.wait(list(running)):
            process, job, start = running.pop(sentinel)
            process.join()
            verdict = "" if process.exitcode == 0 else f", failed with code {process.exitcode}: see {job.log}"
            print(f"{job.name}: {time.monotonic() - start:.0f} s, {len(waiting)} to go{verdict}", flush=True)
            failed += [job] if process.exitcode else []
    return failed


def _in_child(job: Job) -> None:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        job.call()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run_models(options: CellOptions, variants: Sequence[tuple[Variant, int]]) -> None:
    """Train the SFT and reward models of (variant, seed) that do not exist, each once."""
    owners: dict[Path, tuple[Variant, int]] = {}
    for variant, seed in variants:
        for directory in model_directories(options, variant, seed):
            if not (directory / "manifest.json").is_file():
                owners.setdefault(directory, (variant, seed))
    jobs = []
    for directory, (variant, seed) in owners.items():
        name = f"{directory.parent.name}-{directory.name}"
        call = partial(train_model, options, variant, seed, directory)
        jobs.append(Job(name, call, _logs(options) / f"{name}.log"))
    run_jobs(jobs, options.processes)


def run_grid(
    options: GridOptions,
    variants: Sequence[Variant],
    run: Callable[[GridOptions, Variant, int], None] = run_cell,
) -> list[Cell]:
    """The cells of all variants and seeds that are finished after this call; those of a seed one after the other, so
    that an interrupted call leaves whole seeds."""
    grid = [(variant, seed) for seed in range(options.seeds) for variant in variants]
    todo = [(variant, seed) for variant, seed in grid if not cell_file(options, variant, seed).is_file()]
    run_models(options, [(each, seed) for variant, seed in todo for each in (variant, *variant.named)])
    jobs = []
    for variant, seed in todo:
        log = _logs(options) / f"{cell_file(options, variant, seed).stem}.log"
        jobs.append(Job(f"{variant.name}, seed {seed}", partial(run, options, variant, seed), log))
    run_jobs(jobs, options.processes)
    files = [cell_file(options, variant, seed) for variant, seed in grid]
    return [read_cell(path) for path in files if path.is_file()]


def report_grid(
    options: GridOptions,
    variants: Sequence[Variant],
    report: Callable[[Sequence[Cell], Sequence[str], GridOptions], None],
    run: Callable[[GridOptions, Variant, int], None] = run_cell,
) -> int:
    """Run the grid and report its cells, with the names of all variants. Returns 1 if a run failed, else 0.

    Raises: UserError if no run is finished.
    """
    cells = run_grid(options, variants, run)
    if not cells:
        raise UserError(f"{options.output_dir}: no run is finished; see {options.output_dir}/logs")
    report(cells, [variant.name for variant in variants], options)
    return 0 if len(cells) == len(variants) * options.seeds else 1


def _logs(options: CellOptions) -> Path:
    return Path(options.output_dir).absolute() / "logs"
