"""The report on the outcome of every row that was read, and the errors and warnings that follow from it."""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from data.config import DataOptions
from data.prepare.encode import TOO_LONG
from data.prepare.gather import OTHER_PHASE, GatheredRows
from data.prepare.mixture import Origin, hub_id, licence
from data.prepare.repetition import repetitions
from data.prepare.split import OWN_GROUP, PHASES
from data.prepare.store import read_items
from data.read.records import Phase
from rlhf.config import Tree
from rlhf.errors import UserError

CUT_TO_HELD_OUT = "prompt held out for evaluation, once old turns are cut"
REQUIRED = {"sft": "a response", "reward": "a preferred and a rejected response", "ppo": "a prompt"}
"""what a row must have to serve a phase"""
SPLITS = {"train": "training", "evaluation": "evaluation"}
BEYOND_LIMIT = {"train": "beyond max_train_rows", "evaluation": "beyond max_eval_rows", "weight": "beyond its weight"}
NORMAL_OUTCOMES = (*SPLITS, OTHER_PHASE, *BEYOND_LIMIT.values())
"""outcomes of rows without a defect"""
EMPTY_OUTCOMES = ("empty prompt", "empty response")
"""outcomes of rows that are empty before tokenisation"""


def make_report(
    items: dict[str, np.ndarray],
    rows: GatheredRows,
    origins: Sequence[Origin],
    item_rows: np.ndarray,
    splits: dict[str, np.ndarray],
) -> Tree:
    """The report on what became of all rows.

    items: `item_columns`. item_rows: the row that each was made of. splits: those of training and of evaluation.
    Every row has one outcome: the outcomes of a source add up to the number of rows that were read of it.
    """
    reasons, prompt_cut, response_cut = items["reason"], items["prompt_cut"], items["response_cut"]
    for reason in np.unique(reasons[reasons != ""]):
        rows.count_dropped(item_rows[reasons == reason], str(reason))
    report: Tree = {"useful": sum(row_counts.useful for row_counts in rows.counts)}
    for name, index in splits.items():
        unique = np.unique(index)
        rows.count(item_rows[unique], name)
        row_origins = rows.table["origin"][item_rows[index]]
        in_split = rows.table["held_out"][item_rows] == (name == "evaluation")
        digests = rows.table["digest"][item_rows[index]]
        report[name] = {
            "rows": len(index),
            "different_rows": len(unique),
            "in_order": blake2b(digests.tobytes(), digest_size=16).hexdigest(),
            "as_a_set": blake2b(np.sort(digests).tobytes(), digest_size=16).hexdigest(),
            "shortened": int((prompt_cut | response_cut)[unique].sum()),
            "prompts_shortened": int(prompt_cut[unique].sum()),
            "responses_shortened": int(response_cut[unique].sum()),
            "dropped": {str(reason): int(count) for reason, count in Counter(reasons[in_split]).items() if reason},
            "rows_by_source": np.bincount(row_origins, minlength=len(origins)).tolist(),
            "tokens_by_source": np.bincount(row_origins, weights=items["length"][index], minlength=len(origins))
            .astype(int)
            .tolist(),
        }
    repeated = {reason: numbers[rows.usable[numbers]] for reason, numbers in repetitions(rows.table).items()}
    report["repeated"] = {
        reason: {"rows": len(numbers), "locations": rows.locations(numbers)}
        for reason, numbers in repeated.items()
        if len(numbers)
    }
    report["sources"] = [
        {
            "data_path": origin.data_path,
            "use": origin.use,
            "hub_id": hub_id(origin.data_path),
            "licence": licence(origin.data_path),
            "rows": row_counts.rows,
            "outcomes": dict(row_counts.outcomes),
            "locations": row_counts.locations,
            "bad": row_counts.bad,
            "one_opening": row_counts.one_opening,
        }
        for origin, row_counts in zip(origins, rows.counts, strict=True)
    ]
    return report


def item_columns(folder: Path) -> dict[str, np.ndarray]:
    """Columns of the items [N]: the reason for dropping each (empty if kept), whether its prompt or a response was cut,
    its tokens, and the digest of the prompt that the model sees (0 without one)."""
    table = read_items(folder)
    kinds = {"reason": object, "prompt_cut": bool, "response_cut": bool, "length": int, "prompt_digest": np.int64}
    return {name: np.array(table.data.column(name) if table is not None else [], kinds[name]) for name in kinds}


def count_outcomes(report: Tree) -> dict[str, int]:
    """outcome -> rows, over all sources, the most frequent outcome first."""
    total: Counter[str] = Counter()
    for source in report["sources"]:
        total.update(source["outcomes"])
    return dict(total.most_common())


def locations(report: Tree) -> dict[str, list[str]]:
    """reason -> file:line of the first rows that were dropped for it, over all sources."""
    located = {
        r: [at for source in report["sources"] for at in source["locations"].get(r, ())] for r in dropped(report)
    }
    return {reason: located[reason] for reason in sorted(located) if located[reason]}


def dropped(report: Tree) -> dict[str, int]:
    """reason -> rows, of the rows with a defect."""
    return {reason: count for reason, count in count_outcomes(report).items() if reason not in NORMAL_OUTCOMES}


def data_warnings(report: Tree, options: DataOptions) -> list[str]:
    """Warnings on the rows of a phase before training: how many were truncated."""
    warnings, train = [], report["train"]
    if train["shortened"]:
        parts = {"part of the prompt": "prompts_shortened", "the end of a response": "responses_shortened"}
        lost = ", ".join(f"{train[key]} lost {part}" for part, key in parts.items() if train[key])
        warnings.append(
            f"{train['shortened']} of {train['different_rows']} training rows are cut to length: {lost} "
            f"(--max-length {options.max_length}, --max-prompt-length {options.max_prompt_length})"
        )
    if train["cut_alike"]:
        warnings.append(
            f"{train['cut_alike']} of {train['different_rows']} training rows have the same prompt as another dialogue "
            "once old turns are cut, and rows are divided by whole dialogues: the same prompt may serve several stages "
            f"(--max-prompt-length {options.max_prompt_length}, --max-length {options.max_length})"
        )
    return warnings


def division_notes(report: Tree, phase: Phase, options: DataOptions) -> list[str]:
    """How many rows other phases own, if any: a note that one stage of a run has for all."""
    other_phase = count_outcomes(report).get(OTHER_PHASE, 0)
    if not other_phase:
        return []
    split_for_all = ",".join(str(int(name == phase)) for name in PHASES)
    shares = ",".join(f"{share:g}" for share in options.data_split)
    return [
        f"{other_phase} of the {report['useful']} rows that it can use are the other stages' share "
        f"(--data-split {shares}), so that no prompt serves two stages; a run of this stage alone takes all with "
        f"--data-split {split_for_all}"
    ]


def hints(report: Tree) -> str:
    """Causes of too few rows, with what to type, to be added to an error: a .txt file that was read as one document;
    rows that nearly all begin with one user message."""
    added = []
    for source in report["sources"]:
        path, opening = source["data_path"], source["one_opening"]
        if source["rows"] == 1 and path.removesuffix(".gz").endswith(".txt") and "lines=true" not in path:
            added.append(
                f"; {path} is one document, because no empty line divides it: with a document on each line, name it "
                f"files,lines=true:{path.rpartition(':')[2]}"
            )
        if opening:
            added.append(
                f"; nearly all rows of {path} begin with the user message {opening[:60]!r}, and dialogues with one "
                f"first message are never divided: make it a system message, or add a column {OWN_GROUP} with a number "
                "or text for each dialogue"
            )
    return "".join(added)


def require_usable(report: Tree, phase: Phase, options: DataOptions) -> None:
    """Raises: UserError if no row is left for training or evaluation, or too many rows were dropped."""
    data_paths = ", ".join(source["data_path"] for source in report["sources"])
    total = sum(source["rows"] for source in report["sources"])
    evaluates = options.max_eval_rows and (options.eval_data_path or options.eval_fraction)
    for name, purpose in SPLITS.items():
        if not report[name]["rows"] and (name == "train" or evaluates):
            counts = ", ".join(f"{count} {reason}" for reason, count in count_outcomes(report).items())
            got = f"0 usable rows for {purpose} in {phase}; of {total} rows: {counts}" if total else "no rows"
            raise UserError(
                f"{data_paths}: {got}; expected rows with {REQUIRED[phase]}; add some, or change "
                f"--data-split ({','.join(f'{share:g}' for share in options.data_split)}), "
                f"--eval-fraction ({options.eval_fraction:g}), --max-length ({options.max_length}) or "
                f"--max-prompt-length ({options.max_prompt_length}){hints(report)}"
            )
    empty = {reason: count for reason, count in count_outcomes(report).items() if reason in EMPTY_OUTCOMES}
    train = report["train"]
    usable_rows = train["different_rows"] + train["held_out"]
    for reasons, usable in ((train["dropped"], usable_rows), (empty, report["useful"])):
        share = sum(reasons.values()) / max(1, sum(reasons.values()) + usable)
        if share > options.max_dropped:
            first = {reason: f", first in {at[0]}" for reason, at in locations(report).items()}
            counts = "; ".join(f"{count} {reason}{first.get(reason, '')}" for reason, count in reasons.items())
            cure = (
                "raise --max-length or --max-prompt-length (rlhf preview with larger ones prints the lengths), or cut "
                "such rows with --truncate tokens"
                if not TOO_LONG.isdisjoint(reasons)
                else "fix the data"
            )
            raise UserError(
                f"{data_paths}: {share:.0%} of the training rows of {phase} cannot be used ({counts}); "
                f"expected at most {options.max_dropped:.0%} (--max-dropped); {cure}"
            )
