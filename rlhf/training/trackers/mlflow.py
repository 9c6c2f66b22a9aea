"""MLflow. Variables such as MLFLOW_TRACKING_URI apply. Texts and tables are artifacts."""

from collections.abc import Sequence
from typing import Any

from accelerate.tracking import MLflowTracker

from rlhf.training.trackers import Scalar, TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker
from rlhf.training.trackers._accelerate import ServiceOptions as Config


class MLflow(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        return MLflowTracker(project, run_id=run.run_id, run_name=name)

    def run_id(self) -> str:
        return str(self.service.tracker.info.run_id)

    def log_text(self, name: str, text: str, step: int) -> None:
        import mlflow

        mlflow.log_text(text, f"{name}/step-{step:08d}.txt")

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        import mlflow

        by_column = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
        mlflow.log_table(by_column, f"{name}/step-{step:08d}.json")


def build(config: Config) -> MLflow:
    return MLflow(config, "mlflow")
