"""ClearML. Its configuration file and variables such as CLEARML_API_HOST apply."""

from collections.abc import Sequence
from typing import Any

from accelerate.tracking import ClearMLTracker

from rlhf.training.trackers import Scalar, TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker
from rlhf.training.trackers._accelerate import ServiceOptions as Config


class ClearML(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        task = {"reuse_last_task_id": False} if run.run_id is None else {"continue_last_task": run.run_id}
        return ClearMLTracker(project_name=project, task_name=name, auto_connect_frameworks=False, **task)

    def start(self, run: TrackedRun) -> str:
        run_id = super().start(run)
        self.service.tracker.set_initial_iteration(0)  # a continued task adds its last iteration to every later one
        return run_id

    def run_id(self) -> str:
        return str(self.service.tracker.id)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.service.tracker.get_logger().report_text(f"{name}, step {step}: {text}", print_console=False)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        self.service.log_table(name, columns=[*columns], data=[[*row] for row in rows], step=step)


def build(config: Config) -> ClearML:
    return ClearML(config, "clearml")
