"""`python -m benchmarks.peers`: the releases of TRL that the benchmarks compare with, each in its own folder.

`pip install --no-deps --target build/peers/trl-VERSION`: a peer runs in its own process with the same interpreter,
torch and transformers, and with that folder first in PYTHONPATH. 1.12.0 is the last release with PPO.
"""

import os
import subprocess
import sys
from pathlib import Path

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


def main() -> int:
    for version in VERSIONS:
        print(f"trl {version}: {install_trl(version).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
