"""SwanLab. Variables such as SWANLAB_API_KEY and SWANLAB_MODE apply. It has no tables: they are texts."""

from typing import Any

from accelerate.tracking import SwanLabTracker

from rlhf.training.trackers import TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker
from rlhf.training.trackers._accelerate import ServiceOptions as Config


class SwanLab(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        resumed = {} if run.run_id is None else {"id": run.run_id, "resume": "allow"}
        return SwanLabTracker(project, name=name, log_dir=str(run.directory / "swanlog"), **resumed)

    def run_id(self) -> str:
        return str(self.service.tracker.id)

    def log_text(self, name: str, text: str, step: int) -> None:
        import swanlab

        self.service.log({name: swanlab.Text(text)}, step=step)


def build(config: Config) -> SwanLab:
    return SwanLab(config, "swanlab")
