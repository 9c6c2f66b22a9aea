"""Whether the data can fill one batch, asked before anything is trained."""

from data.build.report import NEEDS, fates
from data.config import DataOptions
from data.dataset import Opened
from rlhf.errors import UserError


def require_rows(opened: Opened, options: DataOptions, batch_size: int, ranks: int = 1) -> None:
    """Raises: UserError if there is no batch to train on, or some rank would have no row to evaluate on."""
    train, held_out, phase = opened.train.batch_elements, len(opened.evaluation), opened.train.phase
    if not options.eval_fraction and not options.eval_data_path:
        raise UserError("--eval-fraction 0: every stage is measured on held-out rows; expected more than 0")
    for name, limit, least in (("train", options.max_train_rows, batch_size), ("eval", options.max_eval_rows, ranks)):
        if limit is not None and limit < least:
            raise UserError(f"--max-{name}-rows {limit}: expected at least {least} rows for {phase}")
    if train >= batch_size and held_out >= ranks:
        return
    places = opened.report["places"]
    said = ", ".join(f"{count} {fate}" for fate, count in fates(opened.report).items())
    raise UserError(
        f"{', '.join(place['place'] for place in places)}: {phase} got {train} rows with {NEEDS[phase]} to train on "
        f"and {held_out} held out, of {sum(place['rows'] for place in places)} rows ({said}); expected at least "
        f"{batch_size} (one batch) and {ranks}; add rows, or lower --batch-size"
    )
