"""TensorBoard: event files in OUT/STAGE/tensorboard."""

from typing import Any

from accelerate.tracking import TensorBoardTracker

from rlhf.config import Config as Options
from rlhf.training.trackers import TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker, ServiceOptions


class Config(Options):
    """No options."""


class TensorBoard(AccelerateTracker):
    rewinds = True

    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        # An event at `purge_step` makes TensorBoard ignore earlier events of that step and later ones.
        first_step = 0 if run.run_id is None else run.done + 1
        return TensorBoardTracker("tensorboard", run.directory, purge_step=first_step)

    def run_id(self) -> str:
        return "tensorboard"


def build(config: Config) -> TensorBoard:
    return TensorBoard(ServiceOptions(), "tensorboard")
