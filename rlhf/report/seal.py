"""The seal of a run whose numbers `rlhf verify` has computed again.

It finds accidents: a person who can write the run's files can write a seal, too.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rlhf.storage import disk, manifests

SEAL = "verified.json"


def write(run: Path, files: Sequence[Path], numbers: int, left: int) -> None:
    """Seal the `files` of a run, of which `numbers` numbers hold, and `left` were not computed again."""
    versions = {name: manifests.versions()[name] for name in ("torch", "transformers", "peft")}
    digests = {str(file.relative_to(run)): manifests.digest(file) for file in files}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    disk.write_json(
        run / SEAL, {"date": date, "numbers": numbers, "left": left, "versions": versions, "files": digests}
    )


def describe(run: Path) -> str:
    """The seal in words; empty without one, or if a file of the run is another one since."""
    try:
        seal = disk.read_json(run / SEAL)
        files = {run / name: entry for name, entry in seal["files"].items()}
        unchanged = all(file.is_file() and manifests.digest(file) == entry for file, entry in files.items())
        versions = ", ".join(f"{name} {version}" for name, version in seal["versions"].items())
        text = f"Verified on {seal['date']}: {seal['numbers']} numbers hold when plain transformers computes them"
        text = f"{text} ({versions}), {seal['left']} were not computed again."
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return text if unchanged and files else ""
