"""Comet. Its configuration file and variables such as COMET_API_KEY and COMET_WORKSPACE apply."""

from collections.abc import Sequence
from typing import Any

from accelerate.tracking import CometMLTracker

from rlhf.training.trackers import Scalar, TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker
from rlhf.training.trackers._accelerate import ServiceOptions as Config


class Comet(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        return CometMLTracker(project, experiment_key=run.run_id)

    def start(self, run: TrackedRun) -> str:
        run_id = super().start(run)
        self.service.tracker.set_name(self._config.name or run.stage)
        return run_id

    def run_id(self) -> str:
        return str(self.service.tracker.get_key())

    def log_text(self, name: str, text: str, step: int) -> None:
        self.service.tracker.log_text(text, step=step, metadata={"name": name})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        table = [[*row] for row in rows]
        self.service.tracker.log_table(f"{name}-{step:08d}.csv", tabular_data=table, headers=[*columns])


def build(config: Config) -> Comet:
    return Comet(config, "comet_ml")
