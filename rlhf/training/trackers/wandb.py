"""Weights & Biases. Variables such as WANDB_API_KEY, WANDB_ENTITY and WANDB_MODE=offline apply."""

import os
from collections.abc import Sequence
from typing import Any

from accelerate.tracking import WandBTracker

from rlhf.training.trackers import Scalar, TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker, alert_level
from rlhf.training.trackers._accelerate import ServiceOptions as Config

YES = ("1", "on", "true", "yes")
"""values with which transformers takes WANDB_DISABLED as set"""


class WandB(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        settings = {} if run.run_id is None else {"id": run.run_id, "resume": "allow"}
        if os.environ.get("WANDB_DISABLED", "").lower() in YES:
            settings["mode"] = "disabled"
        return WandBTracker(project, name=name, dir=str(run.directory), **settings)

    def run_id(self) -> str:
        return str(self.service.tracker.id)

    def log_text(self, name: str, text: str, step: int) -> None:
        super().log_text(name, text, step)
        self.service.tracker.alert(name, text, alert_level(name).upper())

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        self.service.log_table(name, columns=[*columns], data=[[*row] for row in rows], step=step)


def build(config: Config) -> WandB:
    return WandB(config, "wandb")
