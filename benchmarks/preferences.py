"""`python -m benchmarks.preferences --data-path harmless-base.jsonl.gz helpful-base.jsonl.gz`: reward models on HH.

A fifth of the first messages of each file is held out, by a digest. With each seed a reward model learns, in one pass,
from 256, 512, ... pairs of all other rows. The table has its accuracy on the held-out pairs beside the rule "the longer
response is better", for

    here        step 2 as it is
    head        step 2, whose head alone learns, four times from the same pairs
    TRL         RewardTrainer on the ids of the same pairs, with the same number and size of batches, rate and optimizer

± is half of Student's 95 % interval over the seeds; differences are paired by seed. The last column joins the models of
all seeds: the mean of their scores, each divided by its standard deviation. A finished model is not trained again.
Writes preferences.csv, and the table of preferences.md; with one data file preferences-FILE.csv and .md.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from benchmarks import inputs, page, peers
from benchmarks.jobs import Job, JobOptions, run_jobs
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.maths import preferences
from rlhf.storage import disk

HERE, TRL = "here", "TRL"
VARIANTS: dict[str, dict[str, Any]] = {
    HERE: {},
    "head": {"learning_rate": 0.0, "head_learning_rate": 2e-3, "num_train_epochs": 4},
}
"""name -> the options of step 2 that differ"""
BATCH = 16
"""pairs of an optimizer step"""
SETTINGS = {"batch_size": BATCH, "learning_rate": 2e-5, "max_prompt_length": 192, "max_length": 256}
"""options of step 2; the rate is the peak of all weights"""
HELD_OUT = 0.2
"""share of the first messages"""
ALL = "all"
"""the pairs of all files"""

Scored = Mapping[str, Mapping[str, list[list[float]]]]
"""file -> scores, lengths -> (chosen, rejected) of each held-out pair"""


class Options(JobOptions):
    """Data, sizes, seeds and variants."""

    data_path: tuple[str, ...] = ()
    """files of HH-RLHF pairs, such as harmless-base.jsonl.gz"""
    model: str = "models/smollm2-135m-instruct"
    """what every reward model starts from"""
    pairs: tuple[int, ...] = Field((256, 512, 1024, 2048), min_length=1)
    """numbers of pairs to learn from; multiples of a batch of 16"""
    variants: tuple[Literal["here", "head"], ...] = (HERE,)
    """which variants; those other than `here` learn from the most pairs only"""
    trl_pairs: tuple[int, ...] = ()
    """numbers of pairs from which TRL learns too"""
    seeds: int = Field(5, ge=2)
    """seeds 0, 1, ... of the head, the pairs and their order"""
    output_dir: str = "runs/preferences"
    """directory of the divided data and of finished models' scores"""

    @property
    def report_name(self) -> str:
        """`preferences`; of one data file `preferences-harmless-base`, beside it."""
        return "preferences" if len(self.data_path) > 1 else f"preferences-{source(self.data_path[0])}"


@dataclass(frozen=True, slots=True)
class Run:
    """A reward model to train."""

    variant: str
    """of VARIANTS, or TRL"""
    pairs: int
    seed: int

    def scores_file(self, options: Options) -> Path:
        """The scores of the held-out pairs: another file for other options or data under the same name."""
        same = {"data_path": options.data_path, **SETTINGS}
        own = VARIANTS.get(self.variant, peers.REWARD)
        digest = hashlib.sha256(repr((options.model, same, own)).encode()).hexdigest()[:8]
        return options.folder / "scores" / f"{self.variant}-{self.pairs}-{digest}-{self.seed}.json"


def check(options: Options) -> None:
    """Raises: UserError for options with which no table can be made."""
    if not options.data_path:
        raise UserError("--data-path: not given, expected files of HH-RLHF pairs, such as harmless-base.jsonl.gz")
    if len({source(path) for path in options.data_path}) < len(options.data_path):
        raise UserError(f"--data-path: got {', '.join(options.data_path)}, expected files of different names")
    for pairs in (*options.pairs, *options.trl_pairs):
        if pairs % BATCH:
            raise UserError(f"--pairs, --trl-pairs: got {pairs}, expected multiples of {BATCH}, a batch")


def source(path: str | Path) -> str:
    """The name of a data file, without its endings."""
    return Path(path).name.split(".")[0]


# --- the rows


def divide(options: Options) -> dict[str, Path]:
    """Write the training rows of all files into one, and the held-out rows of each. Returns the files of the latter."""
    options.folder.mkdir(parents=True, exist_ok=True)
    train: list[str] = []
    held_out = {}
    for path in map(Path, options.data_path):
        rows = inputs.read_lines(path)
        train += [row for row in rows if not is_held_out(row)]
        held_out[source(path)] = target = options.folder / f"held-out-{source(path)}.jsonl"
        target.write_text("".join(filter(is_held_out, rows)), encoding="utf-8")
    train_file(options).write_text("".join(train), encoding="utf-8")
    return held_out


def first_message_point(row: str) -> float:
    """A number in [0, 1) by which dialogues are divided: equal for equal first messages, spread evenly over them."""
    first = json.loads(row)["chosen"].partition("\n\nAssistant:")[0]
    return int(hashlib.sha256(first.encode()).hexdigest()[:8], 16) / 2**32


def is_held_out(row: str) -> bool:
    """Whether the first message of a dialogue is among the held-out ones."""
    return first_message_point(row) < HELD_OUT


def train_file(options: Options) -> Path:
    """All rows that are not held out."""
    return options.folder / "train.jsonl"


# --- models


def reward_config(options: Options, run: Run, held_out: Mapping[str, Path], directory: Path) -> Any:
    """The options of step 2, whose own evaluation is short."""
    from step2_reward.config import RewardConfig

    values = SETTINGS | {
        "model": options.model, "data_path": (f"hh_rlhf:{train_file(options)}",), "data_split": (0, 1, 0),
        "eval_data_path": tuple(f"hh_rlhf:{file}" for file in held_out.values()), "max_eval_rows": 64,
        "max_train_rows": run.pairs, "seed": run.seed, "data_seed": run.seed, "truncate": "tokens", "data_workers": 1,
        "micro_batch_size": BATCH // 4, "torch_compile": False, "output_dir": str(directory),
    }  # fmt: skip
    return RewardConfig(**values | VARIANTS.get(run.variant, {}))


def train(options: Options, run: Run, held_out: Mapping[str, Path]) -> None:
    """Train a model, and write its scores; the model itself is removed."""
    from step2_reward.stage import REWARD_MODELLING

    path = run.scores_file(options)
    directory = path.with_suffix("")
    shutil.rmtree(directory, ignore_errors=True)
    config = reward_config(options, run, held_out, directory)
    if run.variant == TRL:
        train_with_trl(config, directory / "step2_reward")
    else:
        REWARD_MODELLING.run(config)
    write_scores(directory / "step2_reward", held_out, path)
    shutil.rmtree(directory)


def train_with_trl(config: Any, directory: Path) -> None:
    """RewardTrainer in a process of its own, on the ids of the pairs that step 2 would learn from."""
    from data.dataset import Recipe, open_datasets
    from rlhf.engine.adamw import schedule

    tokenizer = inputs.tokenizer(config.model)
    data = open_datasets(config, Recipe("reward"), tokenizer).train
    steps = -(-len(data) // config.batch_size)
    tokenizer.save_pretrained(directory / "tokenizer")
    settings = config.model_dump(mode="json") | {
        "tokenizer": str(directory / "tokenizer"),
        "rows": inputs.pairs(data),
        "learning_rate_factors": list(map(schedule(config, steps), range(steps))),
        "output_dir": str(directory),
    }
    # Freed memory stays with the process, as it does here: to get it again takes longer than the products.
    keep = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "-1"}
    peers.run("trl_reward", peers.REWARD, settings, directory, keep)


def write_scores(model: Path, held_out: Mapping[str, Path], path: Path) -> None:
    """Scores and lengths of both sides of every held-out pair, by file."""
    lengths = SETTINGS["max_prompt_length"], SETTINGS["max_length"]
    pair_scores = score_pairs([model], [f"hh_rlhf:{file}" for file in held_out.values()], lengths)
    scored = {
        name: {"scores": one.scores.tolist(), "lengths": one.lengths.tolist()}
        for name, one in zip(held_out, pair_scores, strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_json(path, scored)


def score_pairs(models: Sequence[Path], data_paths: Sequence[str], lengths: tuple[int, int]) -> list[Any]:
    """`score_models` of step 2. lengths: the most tokens of a prompt, and of prompt and response"""
    from step2_reward.evaluation_options import EvaluateRewardConfig
    from step2_reward.pair_scores import score_models

    evaluation = EvaluateRewardConfig(
        models=tuple(map(str, models)), data_path=tuple(data_paths), truncate="tokens",
        micro_batch_size=16, data_workers=1, max_prompt_length=lengths[0], max_length=lengths[1],
    )  # fmt: skip
    return score_models(evaluation)


def grid(options: Options) -> Iterator[Run]:
    """Every model; those of a seed one after the other, so that an interrupted call leaves whole seeds."""
    most = max(options.pairs)
    kinds = [(name, pairs) for name in options.variants for pairs in (options.pairs if name == HERE else (most,))]
    for seed in range(options.seeds):
        for variant, pairs in [*kinds, *((TRL, pairs) for pairs in options.trl_pairs)]:
            yield Run(variant, pairs, seed)


# --- the report


def gaps(scored: Scored, name: str, column: str) -> Tensor:
    """Chosen minus rejected, float64 [N]. name: of a file, or ALL; column: scores or lengths."""
    names = list(scored) if name == ALL else [name]
    both = torch.tensor([pair for each in names for pair in scored[each][column]], dtype=torch.float64)
    return both[:, 0] - both[:, 1]


def accuracy(scored: Scored, name: str, column: str = "scores") -> float:
    """The share of pairs in the right order by the score, or by the length."""
    return preferences.in_order(gaps(scored, name, column)).mean().item()


def joint_accuracy(models: Sequence[Scored]) -> float:
    """Of the mean of the models' gaps, each divided by its standard deviation."""
    each = [gap / gap.std() for gap in (gaps(scored, ALL, "scores") for scored in models)]
    return preferences.in_order(torch.stack(each).mean(0)).mean().item()


def table(models: Mapping[tuple[str, int], Mapping[int, Scored]]) -> list[str]:
    """Markdown; models: (variant, pairs) -> seed -> scores."""
    some = next(iter(next(iter(models.values())).values()))
    names = [*some, ALL]
    head = ["reward model", "pairs", "seeds", *(f"{name} ({len(gaps(some, name, 'lengths'))})" for name in names)]
    longer = [f"{accuracy(some, name, 'lengths'):.3f}" for name in names]
    lines: list[list[Any]] = [["the longer response", "", "", *longer, "", ""]]
    for (variant, pairs), by_seed in models.items():
        columns = [page.mean_text([accuracy(scored, name) for scored in by_seed.values()]) for name in names]
        default = {} if variant == HERE else models.get((HERE, pairs), {})
        both = [accuracy(by_seed[seed], ALL) - accuracy(default[seed], ALL) for seed in by_seed if seed in default]
        columns += [page.mean_text(both, sign="+"), f"{joint_accuracy(list(by_seed.values())):.3f}"]
        lines.append([variant, pairs, len(by_seed), *columns])
    return page.table([*head, f"minus `{HERE}`, paired", "all seeds joined"], lines)


def report(options: Options) -> None:
    """The table and the CSV of all finished models. Raises: UserError if there is none."""
    models: dict[tuple[str, int], dict[int, Scored]] = {}
    for run in grid(options):
        if run.scores_file(options).is_file():
            scored = json.loads(run.scores_file(options).read_text(encoding="utf-8"))
            models.setdefault((run.variant, run.pairs), {})[run.seed] = scored
    if not models:
        raise UserError(f"{options.folder}: no model is finished; see {options.folder}/logs")
    rows = [
        [variant, pairs, seed, name, f"{accuracy(scored, name):.4f}"]
        for (variant, pairs), by_seed in models.items()
        for seed, scored in by_seed.items()
        for name in (*scored, ALL)
    ]
    head = ["model", "pairs", "seed", "file", "accuracy"]
    page.write(Path(options.results) / options.report_name, head, rows, table(models))


def main() -> int:
    """Exit code 1 if a model failed."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.preferences", "Reward models on preferences.")
    check(options)
    held_out = divide(options)
    jobs = [
        Job(run.scores_file(options).stem, partial(train, options, run, held_out), run.scores_file(options))
        for run in grid(options)
    ]
    good = run_jobs(jobs, options)
    report(options)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
