"""What became of every row that was read, and when that is a reason to stop."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.build.gather import ELSEWHERE, Gathered
from data.build.mixture import Origin
from data.build.split import PHASES
from data.build.store import read_items
from data.config import DataOptions
from data.read.records import Phase
from rlhf.errors import UserError

NEEDS = {"sft": "a response", "reward": "a preferred and a rejected response", "ppo": "a prompt"}
"""What a row must have to serve a phase."""
SIDES = {"train": "training", "evaluation": "evaluation"}
BEYOND = {"train": "beyond max_train_rows", "evaluation": "beyond max_eval_rows", "weight": "beyond its weight"}
KEPT = (*SIDES, ELSEWHERE, *BEYOND.values())
"""Fates of rows that nothing is wrong with."""
EMPTY = ("empty prompt", "empty response")
"""Fates of rows that come to nothing before the tokenizer."""


def account(
    folder: Path, rows: Gathered, found: Sequence[Origin], picked: np.ndarray, sides: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The report on the items of `folder`, made of the rows at positions `picked`; `sides` are numbers of items.

    Every row has one fate: the sum of a place's fates is the number of rows read there.
    """
    reasons, prompt_cut, response_cut, lengths = outcomes(folder)
    for reason in np.unique(reasons[reasons != ""]):
        rows.count(picked[reasons == reason], str(reason))
    report: dict[str, Any] = {"useful": sum(ledger.useful for ledger in rows.ledgers)}
    for name, index in sides.items():
        different = np.unique(index)
        rows.count(picked[different], name)
        owners = rows.origins[picked[index]]
        mine = rows.held_out[picked] == (name == "evaluation")
        report[name] = {
            "rows": len(index),
            "different_rows": len(different),
            "shortened": int((prompt_cut | response_cut)[different].sum()),
            "prompts_shortened": int(prompt_cut[different].sum()),
            "responses_shortened": int(response_cut[different].sum()),
            "dropped": {str(reason): int(count) for reason, count in Counter(reasons[mine]).items() if reason},
            "rows_by_place": np.bincount(owners, minlength=len(found)).tolist(),
            "tokens_by_place": np.bincount(owners, weights=lengths[index], minlength=len(found)).astype(int).tolist(),
        }
    report["places"] = [
        {"place": o.location, "use": o.use, "rows": ledger.rows, "fates": dict(ledger.fates), "bad": ledger.bad}
        for o, ledger in zip(found, rows.ledgers, strict=True)
    ]
    return report


def outcomes(folder: Path) -> list[np.ndarray]:
    """Of each item: why it was dropped (empty if it was not), whether its prompt and a response was cut, its tokens."""
    table = read_items(folder)
    kinds = {"reason": object, "prompt_cut": bool, "response_cut": bool, "length": int}
    return [np.array(table.data.column(name) if table is not None else [], kind) for name, kind in kinds.items()]


def fates(report: dict[str, Any]) -> dict[str, int]:
    """What became of the rows of all places, the most frequent first."""
    total: Counter[str] = Counter()
    for place in report["places"]:
        total.update(place["fates"])
    return dict(total.most_common())


def dropped(report: dict[str, Any]) -> dict[str, int]:
    """Rows that something is wrong with, by reason."""
    return {reason: count for reason, count in fates(report).items() if reason not in KEPT}


def notes(report: dict[str, Any], phase: Phase, options: DataOptions) -> list[str]:
    """What a person should know of the rows of a phase before it is trained: what was cut, and what others have."""
    said, train = [], report["train"]
    if train["shortened"]:
        parts = {"part of the prompt": "prompts_shortened", "the end of a response": "responses_shortened"}
        lost = ", ".join(f"{train[key]} lost {part}" for part, key in parts.items() if train[key])
        said.append(
            f"{train['shortened']} of {train['different_rows']} training rows are cut to length: {lost} "
            f"(--max-length {options.max_length}, --max-prompt-length {options.max_prompt_length})"
        )
    elsewhere = fates(report).get(ELSEWHERE, 0)
    if elsewhere:
        every = ",".join(str(int(name == phase)) for name in PHASES)
        shares = ",".join(f"{share:g}" for share in options.data_split)
        said.append(
            f"{elsewhere} of {sum(place['rows'] for place in report['places'])} rows are the other stages' share "
            f"(--data-split {shares}); --data-split {every} takes all, for a run without them"
        )
    return said


def require_usable(report: dict[str, Any], phase: Phase, options: DataOptions) -> None:
    """Raises: UserError if nothing is left to train or to evaluate on, or too much of it had to be dropped."""
    where = ", ".join(place["place"] for place in report["places"])
    total = sum(place["rows"] for place in report["places"])
    measured = options.max_eval_rows and (options.eval_data_path or options.eval_fraction)
    for name, use in SIDES.items():
        if not report[name]["rows"] and (name == "train" or measured):
            said = ", ".join(f"{count} {reason}" for reason, count in fates(report).items())
            raise UserError(
                f"{where}: 0 usable rows for {use} in {phase}; of {total} rows: {said or 'none'}; expected rows with "
                f"{NEEDS[phase]}; add some, or change --data-split ({','.join(f'{s:g}' for s in options.data_split)}), "
                f"--eval-fraction ({options.eval_fraction:g}), --max-length ({options.max_length}) or "
                f"--max-prompt-length ({options.max_prompt_length})"
            )
    empty = {reason: count for reason, count in fates(report).items() if reason in EMPTY}
    for reasons, kept in ((report["train"]["dropped"], report["train"]["different_rows"]), (empty, report["useful"])):
        share = sum(reasons.values()) / max(1, sum(reasons.values()) + kept)
        if share > options.max_dropped:
            said = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            longer = any("long" in reason or "truncation" in reason for reason in reasons)
            cure = (
                "raise --max-length or --max-prompt-length, or cut such rows with --truncate tokens"
                if longer
                else "mend the data"
            )
            raise UserError(
                f"{where}: {share:.0%} of the training rows of {phase} cannot be used ({said}); expected at most "
                f"{options.max_dropped:.0%} (--max-dropped); {cure}"
            )
