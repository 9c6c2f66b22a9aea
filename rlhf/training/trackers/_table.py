"""The services that accelerate has a class for, which opens a service's run and sends it numbers. Each class here adds
what accelerate does not know: how a run is continued, and how texts and tables are sent.

Their own variables and files apply, such as WANDB_API_KEY, WANDB_MODE=offline, COMET_WORKSPACE, CLEARML_API_HOST,
MLFLOW_TRACKING_URI, SWANLAB_MODE or TRACKIO_SPACE_ID (docs/running.md).
"""

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import ClassVar, Self

from accelerate import tracking
from accelerate.state import PartialState

from rlhf.config import Config as Options
from rlhf.errors import UserError
from rlhf.training.trackers import VERDICT, Scalar, TrackedRun, Tracker

Rows = Sequence[Sequence[Scalar]]


class ServiceOptions(Options):
    """Where a service lists the run."""

    project: str = ""
    """project or experiment; by default the name of the output directory"""
    name: str = ""
    """the run in the project; by default the name of the stage"""


class NoOptions(Options):
    """Files in the directory of the stage need no names."""


class Service(Tracker):
    """A tracker that sends through one of accelerate's classes. The class is also the plug-in."""

    Config: ClassVar[type[Options]] = ServiceOptions
    package: ClassVar[str]
    id_of_run: ClassVar[str] = "id"
    """the attribute of the service's run"""

    def __init__(self, project: str = "", name: str = "") -> None:
        self._project, self._name = project, name
        self.service: tracking.GeneralTracker = None

    @classmethod
    def build(cls, config: Options) -> Self:
        """Raises: UserError if the package is not installed."""
        spec = importlib.util.find_spec(cls.package)
        if spec is None or spec.origin is None:  # a folder ./wandb or ./aim, which these write, has no origin
            raise UserError(f"the package is not installed; pip install {cls.package}, or leave the tracker out")
        return cls(**config.model_dump())

    @abstractmethod
    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        """accelerate's tracker, not started."""

    def run_id(self) -> str:
        """The id of the service's run."""
        return str(attrgetter(self.id_of_run)(self.service.tracker))

    def start(self, run: TrackedRun) -> str:
        PartialState()  # accelerate's logger, to which each of its trackers writes, raises an error without it
        self.service = self.open(self._project or run.project, self._name or run.stage, run)
        self.service.start()
        return self.run_id()

    def log_config(self, config: Mapping[str, Scalar]) -> None:
        self.service.store_init_configuration(dict(config))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.service.log(dict(metrics), step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.service.log({name: text}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        self.log_text(name, as_markdown(columns, rows), step)

    def finish(self) -> None:
        self.service.finish()


class Aim(Service):
    """The repository is OUT/.aim, shared by the stages of a run. It has no tables: they are texts."""

    package = "aim"
    id_of_run = "hash"

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        return tracking.AimTracker(name, str(run.directory.parent), experiment=project, run_hash=run.run_id)

    def log_text(self, name: str, text: str, step: int) -> None:
        import aim

        self.service.tracker.track(aim.Text(text), name=name, step=step)


class ClearML(Service):
    package = "clearml"

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        task = {"reuse_last_task_id": False} if run.run_id is None else {"continue_last_task": run.run_id}
        return tracking.ClearMLTracker(project_name=project, task_name=name, auto_connect_frameworks=False, **task)

    def run_id(self) -> str:
        self.service.tracker.set_initial_iteration(0)  # a continued task adds its last iteration to every later one
        return super().run_id()

    def log_text(self, name: str, text: str, step: int) -> None:
        self.service.tracker.get_logger().report_text(f"{name}, step {step}: {text}", print_console=False)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        self.service.log_table(name, columns=[*columns], data=_lists(rows), step=step)


class Comet(Service):
    package = "comet_ml"

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        return tracking.CometMLTracker(project, experiment_key=run.run_id)

    def start(self, run: TrackedRun) -> str:
        run_id = super().start(run)
        self.service.tracker.set_name(self._name or run.stage)
        return run_id

    def run_id(self) -> str:
        return str(self.service.tracker.get_key())

    def log_text(self, name: str, text: str, step: int) -> None:
        self.service.tracker.log_text(text, step=step, metadata={"name": name})

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        self.service.tracker.log_table(f"{name}-{step:08d}.csv", tabular_data=_lists(rows), headers=[*columns])


class MLflow(Service):
    """Texts and tables are artifacts."""

    package = "mlflow"
    id_of_run = "info.run_id"

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        return tracking.MLflowTracker(project, run_id=run.run_id, run_name=name)

    def log_text(self, name: str, text: str, step: int) -> None:
        import mlflow

        mlflow.log_text(text, f"{name}/step-{step:08d}.txt")

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        import mlflow

        by_column = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
        mlflow.log_table(by_column, f"{name}/step-{step:08d}.json")


class SwanLab(Service):
    """It has no tables: they are texts."""

    package = "swanlab"

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        resumed = {} if run.run_id is None else {"id": run.run_id, "resume": "allow"}
        return tracking.SwanLabTracker(project, name=name, log_dir=str(run.directory / "swanlog"), **resumed)

    def log_text(self, name: str, text: str, step: int) -> None:
        import swanlab

        self.service.log({name: swanlab.Text(text)}, step=step)


class TensorBoard(Service):
    """Event files in OUT/STAGE/tensorboard."""

    Config = NoOptions
    package = "tensorboard"
    rewinds = True

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        # An event at `purge_step` makes TensorBoard ignore earlier events of that step and later ones.
        first_step = 0 if run.run_id is None else run.done + 1
        return tracking.TensorBoardTracker("tensorboard", run.directory, purge_step=first_step)

    def run_id(self) -> str:
        return "tensorboard"


class Trackio(Service):
    """It stores runs on this machine, or in a Space with the variable TRACKIO_SPACE_ID."""

    package = "trackio"
    id_of_run = "name"

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        resume = "never" if run.run_id is None else "allow"
        return tracking.TrackioTracker(project, name=run.run_id or name, resume=resume)

    def log_text(self, name: str, text: str, step: int) -> None:
        from trackio import AlertLevel

        super().log_text(name, text, step)
        self.service.tracker.alert(name, text, AlertLevel(alert_level(name)), step)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        import trackio
        from pandas import DataFrame

        table = trackio.Table(dataframe=DataFrame(_lists(rows), columns=[*columns]))
        self.service.log({name: table}, step=step)


class WandB(Service):
    package = "wandb"

    def open(self, project: str, name: str, run: TrackedRun) -> tracking.GeneralTracker:
        settings = {} if run.run_id is None else {"id": run.run_id, "resume": "allow"}
        return tracking.WandBTracker(project, name=name, dir=str(run.directory), **settings)

    def log_text(self, name: str, text: str, step: int) -> None:
        super().log_text(name, text, step)
        self.service.tracker.alert(name, text, alert_level(name).upper())

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        self.service.log_table(name, columns=[*columns], data=_lists(rows), step=step)


SERVICES = (Aim, ClearML, Comet, MLflow, SwanLab, TensorBoard, Trackio, WandB)
ROWS: Mapping[str, type[Service]] = MappingProxyType({service.package: service for service in SERVICES})


def alert_level(name: str) -> str:
    """The level of the alert for a text: the result of a stage is information, all else a warning."""
    return "info" if name == VERDICT else "warn"


def as_markdown(columns: Sequence[str], rows: Rows) -> str:
    """The table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Scalar) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def _lists(rows: Rows) -> list[list[Scalar]]:
    return [[*row] for row in rows]
