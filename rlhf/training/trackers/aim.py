"""Aim: the repository is OUT/.aim, shared by the stages of a run. It has no tables: they are texts."""

from typing import Any

from accelerate.tracking import AimTracker

from rlhf.training.trackers import TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker
from rlhf.training.trackers._accelerate import ServiceOptions as Config


class Aim(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        return AimTracker(name, str(run.directory.parent), experiment=project, run_hash=run.run_id)

    def run_id(self) -> str:
        return str(self.service.tracker.hash)

    def log_text(self, name: str, text: str, step: int) -> None:
        import aim

        self.service.tracker.track(aim.Text(text), name=name, step=step)


def build(config: Config) -> Aim:
    return Aim(config, "aim")
