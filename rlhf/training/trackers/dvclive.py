"""DVCLive: files in OUT/STAGE/dvclive. It has numbers only; warnings and samples are in the files of the stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import DVCLiveTracker

from rlhf.config import Config as Options
from rlhf.errors import UserError
from rlhf.training.trackers import Scalar, TrackedRun
from rlhf.training.trackers._accelerate import AccelerateTracker, ServiceOptions


class Config(Options):
    """No options."""


class DVCLive(AccelerateTracker):
    def open(self, project: str, name: str, run: TrackedRun) -> Any:
        # No commit into the user's git repository, and no dvc.yaml beside it.
        directory, resume = str(run.directory / "dvclive"), run.run_id is not None
        return DVCLiveTracker(dir=directory, resume=resume, save_dvc_exp=False, dvcyaml=None)

    def run_id(self) -> str:
        return "dvclive"

    def log_text(self, name: str, text: str, step: int) -> None:
        """Nothing is sent."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], step: int) -> None:
        """Nothing is sent."""


def build(config: Config) -> DVCLive:
    """Raises: UserError in a git repository without DVC, where the library would run `dvc init` (dvclive 3.49)."""
    tracker = DVCLive(ServiceOptions(), "dvclive")
    folders = (Path.cwd(), *Path.cwd().parents)
    repository = next((folder for folder in folders if (folder / ".git").exists()), None)
    if repository is not None and not any((folder / ".dvc").is_dir() for folder in folders):
        raise UserError(
            f"dvclive would make a DVC repository of {repository}; run `dvc init` there if you want one, or name "
            "another tracker"
        )
    return tracker
