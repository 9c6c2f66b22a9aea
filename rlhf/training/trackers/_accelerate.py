"""What the trackers over accelerate's classes share. accelerate's class opens a service's run and sends it numbers; a
subclass adds what accelerate does not know: how a run is continued, and how texts and tables are sent."""

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.state import PartialState

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.training.trackers import VERDICT, Scalar, TrackedRun, Tracker


class ServiceOptions(Config):
    """Where a service lists the run. All else is set by the variables that the service reads, such as WANDB_ENTITY."""

    project: str = ""
    """project or experiment; by default the name of the output directory"""
    name: str = ""
    """the run in the project; by default the name of the stage"""


class AccelerateTracker(Tracker):
    """A tracker that sends through one of accelerate's classes."""

    def __init__(self, config: ServiceOptions, package: str) -> None:
        """Raises: UserError if the package is not installed."""
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder ./wandb or ./aim, which these write, has no origin
            raise UserError(f"the package is not installed; pip install {package}, or leave the tracker out")
        self._config = config
        self.service: Any = None

    @abstractmethod
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        """accelerate's tracker, not started."""

    @abstractmethod
    def run_id(self) -> str:
        """The id of the service's run."""

    def start(self, run: TrackedRun) -> str:
        PartialState()  # accelerate's logger, to which each of its trackers writes, raises an error without it
        self.service = self.open(self._config.project or run.project, self._config.name or run.stage, run)
        self.service.start()
        return self.run_id()

    def log_config(self, config: Mapping[str, Scalar]) -> None:
        self.service.store_init_configuration(dict(config))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.service.log(dict(metrics), step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.service.log({name: text}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        self.log_text(name, as_markdown(columns, rows), step)

    def finish(self) -> None:
        self.service.finish()


def alert_level(name: str) -> str:
    """The level of the alert for a text: the result of a stage is information, all else a warning."""
    return "info" if name == VERDICT else "warn"


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[Scalar]]) -> str:
    """The table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Scalar) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
