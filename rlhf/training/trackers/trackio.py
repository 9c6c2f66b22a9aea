"""Trackio, which stores runs on this machine, or in a Space with the variable TRACKIO_SPACE_ID."""

from collections.abc import Sequence
from typing import Any

from accelerate.tracking import TrackioTracker

from rlhf.training.trackers import Scalar, TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker, alert_level
from rlhf.training.trackers._accelerate import ServiceOptions as Config


class Trackio(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        resume = "never" if run.run_id is None else "allow"
        return TrackioTracker(project, name=run.run_id or name, resume=resume)

    def run_id(self) -> str:
        return str(self.service.tracker.name)

    def log_text(self, name: str, text: str, step: int) -> None:
        from trackio import AlertLevel

        super().log_text(name, text, step)
        self.service.tracker.alert(name, text, AlertLevel(alert_level(name)), step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        import trackio
        from pandas import DataFrame

        table = trackio.Table(dataframe=DataFrame([[*row] for row in rows], columns=[*columns]))
        self.service.log({name: table}, step=step)


def build(config: Config) -> Trackio:
    return Trackio(config, "trackio")
