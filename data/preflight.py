"""Whether the data can fill one batch, asked before anything is trained and without a tokenizer."""

from data.config import DataOptions
from data.dataset import share_of
from data.mixture import open_sources
from data.reading import Phase
from rlhf.config import UserError
from rlhf.types import Row

NEEDS = {"sft": "a response", "reward": "a preferred and a rejected response", "ppo": "a prompt"}


def require_rows(options: DataOptions, phase: Phase, batch_size: int, ranks: int = 1) -> None:
    """Read until there is one batch to train on and a row for every rank to evaluate on: most of a file is not read.

    Raises: UserError if a place cannot be read, its first row is malformed, or there are too few rows of the kind.
    """
    for place in options.data_path:
        next(open_sources([place]).rows(phase), None)
    for name, limit, least in (("train", options.max_train_rows, batch_size), ("eval", options.max_eval_rows, ranks)):
        if limit is not None and limit < least:
            raise UserError(f"--max-{name}-rows {limit}: expected at least {least} rows for {phase}")
    if not options.eval_fraction:
        raise UserError("--eval-fraction 0: every stage is measured on held-out rows; expected more than 0")
    total = train = held_out = 0
    for row in open_sources(options.data_path).rows(phase):
        total += 1
        share = share_of(row, options) if _serves(row, phase) else ""
        train += share == phase
        held_out += share == "evaluation"
        if train >= batch_size and held_out >= ranks:
            return
    split = ":".join(f"{part:g}" for part in options.data_split)
    raise UserError(
        f"{', '.join(options.data_path)}: {phase} got {train} rows with {NEEDS[phase]} to train on and {held_out} held "
        f"out, of {total} rows (--data-split {split}, --eval-fraction {options.eval_fraction:g}); expected at least "
        f"{batch_size} (one batch) and {ranks}; add rows, or lower --batch-size"
    )


def _serves(row: Row, phase: Phase) -> bool:
    has = {"sft": row.response, "reward": row.rejected, "ppo": "".join(message.content for message in row.prompt)}
    return bool((has[phase] or "").strip())
