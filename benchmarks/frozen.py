"""`python -m benchmarks.frozen --data-path harmless-base.jsonl.gz helpful-base.jsonl.gz`: heads on frozen features.

Data, held-out pairs and the pairs of a seed are those of benchmarks.preferences. A base of the first four fifths of the
layers reads these pairs once. Logistic regressions learn from its last hidden states, chosen minus rejected:

    one head          of all pairs
    a head a file     of the pairs of each file; a pair's score is that of its file's head (by file), or p a + (1 - p) b
                      with p by a third regression on the mean of the prompt's states (by prompt)

The states are those of the last token, where a reward model is read, or their mean over the response. ± is half of
Student's 95 % interval over the seeds. The last rows learn once from the pairs of all seeds. Writes
preferences-frozen.csv, and the table of preferences-frozen.md.
"""

import csv
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import inputs, page, preferences
from benchmarks.preferences import ALL, HERE, TRL, Options, Run, mean_text, source
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.maths.preferences import in_order

READINGS = ("last token", "mean")
HEADS = ("one head", "a head a file, by prompt", "a head a file, by file")
DEPTH = 0.8
"""of the layers; the mean in layer 24 of 30 did best, beside 16, 20 and 22, by cross-validation in training pairs"""
PENALTY = 1.0
"""of the squared weights, whose features have a deviation of 1; chosen among 0.3, 1 and 3 on training pairs"""
Results = dict[tuple[str, str, int], dict[int, dict[str, float]]]
"""(heads, reading, pairs) -> seed -> file -> accuracy"""


# --- features


def open_pairs(options: Options, run: Run, held_out: Mapping[str, Path], path: Path | None = None) -> Sequence[Any]:
    """The pairs that `run` learns, in ids; with `path` all pairs of that file."""
    from data.dataset import Recipe, open_datasets

    config = preferences.reward_config(options, run, held_out, options.folder)
    if path:
        whole = {"data_path": (f"hh_rlhf:{path}",), "max_train_rows": None, "eval_data_path": (), "max_eval_rows": 0}
        config = config.model_copy(update={**whole, "eval_fraction": 0.0})
    return open_datasets(config, Recipe("reward"), inputs.tokenizer(options.model)).train[:]


@torch.inference_mode()
def hidden_states(path: str, items: Sequence[Any]) -> Tensor:
    """Of each pair the chosen side's last and mean, the same of the rejected side, and the prompt's mean: fp16
    [N, 5, D]. A pair is one row, whose common prefix is computed once."""
    from transformers import AutoConfig, AutoModel

    from data.batches import pair_batch
    from rlhf.models.packing import pair_inputs

    layers = round(AutoConfig.from_pretrained(path).num_hidden_layers * DEPTH)
    model = AutoModel.from_pretrained(path, num_hidden_layers=layers, dtype=torch.float32).eval()
    states = []
    for item in items:
        rows = pair_batch([item], 0).joined()
        (hidden,) = model(**pair_inputs(model, rows).inputs, use_cache=False).last_hidden_state
        (position,), (branch,), (ends,) = rows.positions, rows.branch, rows.ends
        response = position >= item.prompt_length
        pools = [hidden[~response].mean(0)]
        for end, other in zip(ends, (2, 1), strict=True):
            pools[-1:-1] = [hidden[end], hidden[response & (branch != other)].mean(0)]
        states.append(torch.stack(pools).half())
    return torch.stack(states)


# --- regressions


def logistic(x: Tensor, steps: int = 12) -> Tensor:
    """w [D] that minimises mean_n log(1 + exp(-w . x_n)) + PENALTY / 2 |w|^2, by Newton's method. x [N, D]."""
    weight = x.new_zeros(x.shape[1])
    for _ in range(steps):
        wrong = torch.sigmoid(-x @ weight)
        gradient = PENALTY * weight - x.T @ wrong / len(x)
        hessian = PENALTY * torch.eye(len(weight)) + (x.T * (wrong * (1 - wrong))) @ x / len(x)
        weight = weight - torch.linalg.solve(hessian, gradient)
    return weight


def head_scores(states: Tensor, first: Tensor, reading: int, train: Tensor, test: Tensor) -> Iterator[Tensor]:
    """Scores of the pairs `test`, chosen minus rejected, by each of HEADS, from the pairs `train`; both are rows.

    states: of `hidden_states` [N, 5, D]; first: whether a pair is of the first file [N]
    """
    x, prompts = states[:, reading] - states[:, reading + 2], states[:, -1]
    x = x / x[train].std(0)
    yield x[test] @ logistic(x[train])
    a, b = (x[test] @ logistic(x[train[of[train]]]) for of in (first, ~first))
    prompts = (prompts - prompts[train].mean(0)) / prompts[train].std(0)
    p = torch.sigmoid(prompts[test] @ logistic(prompts[train] * (2.0 * first[train, None] - 1)))
    yield p * a + (1 - p) * b
    yield torch.where(first[test], a, b)


def accuracies(options: Options) -> Results:
    """Of every head, number of pairs and seed; the hidden states are kept in the output directory."""
    held_out = preferences.divide(options)
    lessons = {
        (pairs, seed): set(open_pairs(options, Run(HERE, pairs, seed), held_out))
        for pairs in options.pairs
        for seed in range(options.seeds)
    }
    learned: set[Any] = set().union(*lessons.values())
    lessons[len(learned), 0] = learned
    items: list[Any] = []
    tested: list[bool] = []
    files: list[int] = []
    for number, path in enumerate(options.data_path):
        test = set(open_pairs(options, Run(HERE, 1, 0), {}, held_out[source(path)]))
        needed = [item for item in open_pairs(options, Run(HERE, 1, 0), {}, Path(path)) if item in test | learned]
        items, tested, files = items + needed, tested + [x in test for x in needed], files + [number] * len(needed)
    digest = hashlib.sha256(repr((options.model, DEPTH, items)).encode()).hexdigest()[:8]
    cache = options.folder / f"states-{digest}.pt"
    if not cache.is_file():
        torch.save(hidden_states(options.model, items), cache)
    states, file, rows = torch.load(cache).float(), torch.tensor(files), torch.tensor(tested).nonzero()[:, 0]
    results: Results = {}
    for reading, reading_name in enumerate(READINGS):
        for (pairs, seed), lesson in lessons.items():
            train = torch.tensor([item in lesson for item in items]).nonzero()[:, 0]
            for name, gaps in zip(HEADS, head_scores(states, file == 0, reading, train, rows), strict=True):
                right = in_order(gaps)
                by_file = {source(x): right[file[rows] == i].mean().item() for i, x in enumerate(options.data_path)}
                results.setdefault((name, reading_name, pairs), {})[seed] = by_file | {ALL: right.mean().item()}
    return results


# --- the report


def trl_accuracies(options: Options) -> dict[tuple[int, int], float]:
    """(pairs, seed) -> the accuracy of TRL's RewardTrainer on the same held-out pairs, by benchmarks.preferences."""
    with (Path(options.results) / f"{options.report_name}.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["file"]) == (TRL, ALL)]
    return {(int(row["pairs"]), int(row["seed"])): float(row["accuracy"]) for row in rows}


def table(results: Results, trl: dict[tuple[int, int], float]) -> list[str]:
    """Markdown: the mean over the seeds, and minus TRL's where it learned from the same pairs."""
    names = list(next(iter(next(iter(results.values())).values())))
    lines = [f"| heads | states | pairs | {' | '.join(names)} | minus TRL, paired |", "|" + "---|" * (len(names) + 4)]
    for (name, reading, pairs), by_seed in results.items():
        columns = [mean_text([accuracy[file] for accuracy in by_seed.values()]) for file in names]
        gains = [by_seed[seed][ALL] - trl[pairs, seed] for seed in by_seed if (pairs, seed) in trl]
        lines.append(f"| {name} | {reading} | {pairs} | {' | '.join(columns)} | {mean_text(gains, sign='+')} |")
    return lines


def main() -> int:
    """Features, regressions, report."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.frozen", "Heads on frozen features of HH.")
    preferences.check(options)
    if len(options.data_path) != 2:
        raise UserError(f"--data-path: got {len(options.data_path)} files, expected two: one for each kind")
    results = accuracies(options)
    path = Path(options.results) / f"{options.report_name}-frozen.md"
    rows = [
        [*kind, seed, file, f"{value:.4f}"]
        for kind, by_seed in results.items()
        for seed, by_file in by_seed.items()
        for file, value in by_file.items()
    ]
    page.write_csv(path.with_suffix(".csv"), ["heads", "states", "pairs", "seed", "file", "accuracy"], rows)
    page.write_table(path, table(results, trl_accuracies(options)))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
