"""`python -m benchmarks.peers`: the releases of TRL that the benchmarks compare with, each in its own folder.

`pip install --no-deps --target build/peers/trl-VERSION`: a peer runs in its own process with the same interpreter,
torch and transformers, and with that folder first in PYTHONPATH. 1.12.0 is the last release with PPO.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf import errors
from rlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "peers"
SFT = REWARD = "1.16.0"
PPO = "1.12.0"
VERSIONS = (SFT, PPO)


def install_trl(version: str) -> Path:
    """The folder of a release of TRL, which pip installs if it is missing.

    Raises: UserError if pip fails.
    """
    folder = FOLDER / f"trl-{version}"
    if (folder / "trl" / "__init__.py").is_file():
        return folder
    arguments = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", *arguments, f"trl=={version}"]
    print(f"fetching trl=={version} into {folder.relative_to(ROOT)}", flush=True)
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise UserError(f"trl=={version}: pip could not get it; see above, or unpack its wheel into {folder}")
    return folder


def environment(version: str) -> dict[str, str]:
    """Further environment variables of a process that imports that release."""
    parts = [str(install_trl(version)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(parts), "TRL_EXPERIMENTAL_SILENCE": "1"}


def run(
    module: str, version: str, settings: Mapping[str, Any], folder: Path, variables: Mapping[str, str] | None = None
) -> None:
    """`python -m benchmarks.MODULE SETTINGS.json` with that release, one thread and the settings in `folder`.

    variables: further ones of its environment. Raises: CalledProcessError if it fails; it has printed the reason
    """
    path = folder.resolve() / "settings.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    env = os.environ | environment(version) | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", f"benchmarks.{module}", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, env=env | dict(variables or {}))


def main() -> int:
    for version in VERSIONS:
        print(f"trl {version}: {install_trl(version).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
