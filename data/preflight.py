"""Before training: whether the data fills at least one batch, and for a plan about how many rows there are."""

import functools
from pathlib import Path

from data.config import DataOptions
from data.dataset import PhaseData
from data.prepare.mixture import open_origin, parse_data_path
from data.prepare.report import REQUIRED, count_outcomes, opening_hint, text_hint
from data.prepare.split import PHASES
from data.read.records import Phase
from rlhf.errors import UserError
from rlhf.types import Row


def expected_rows(options: DataOptions, phase: Phase) -> int:
    """About how many rows an epoch of the phase has, by its share of the files; 0 if they are not all files here."""
    counts = [_rows_of_file(path, phase) for path in options.data_path]
    if not all(counts):
        return 0
    share = options.data_split[PHASES.index(phase)] / sum(options.data_split) * (1 - options.eval_fraction)
    return min(round(sum(counts) * share), options.max_train_rows or sum(counts))


@functools.cache
def _rows_of_file(data_path: str, phase: Phase) -> int:
    _, path, weight = parse_data_path(data_path)
    if weight is not None or not Path(path).expanduser().is_file():
        return 0
    try:
        return sum(isinstance(row, Row) for row in open_origin(data_path).rows(phase))
    except UserError:
        return 0  # the stage says it


def require_rows(opened: PhaseData, options: DataOptions, batch_size: int, ranks: int = 1) -> None:
    """Raises: UserError if the rows do not fill a training batch, or not every rank gets a row for evaluation."""
    train, held_out, phase = opened.train.batch_elements, len(opened.evaluation), opened.train.phase
    if not options.eval_fraction and not options.eval_data_path:
        raise UserError("--eval-fraction 0: every stage is evaluated on held-out rows; expected more than 0")
    for name, limit, minimum in (("train", options.max_train_rows, batch_size), ("eval", options.max_eval_rows, ranks)):
        if limit is not None and limit < minimum:
            raise UserError(f"--max-{name}-rows {limit}: expected at least {minimum} rows for {phase}")
    if train >= batch_size and held_out >= ranks:
        return
    sources = opened.report["sources"]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(opened.report).items())
    raise UserError(
        f"{', '.join(source['data_path'] for source in sources)}: {phase} got {train} rows with {REQUIRED[phase]} "
        f"to train on and {held_out} held out, of {sum(source['rows'] for source in sources)} rows ({counts}); "
        f"expected at least {batch_size} (one batch) and {ranks}; add rows, or lower --batch-size"
        + text_hint(opened.report)
        + opening_hint(opened.report)
    )
