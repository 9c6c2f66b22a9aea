"""`python -m benchmarks.peers`: the releases of TRL that the benchmarks compare with, each in a folder of its own.

`pip install --no-deps --target build/peers/trl-VERSION`: a peer runs in a process of its own under the very same
interpreter, torch and transformers, with that folder before all others in PYTHONPATH. 1.12.0 is the last that has PPO.
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
    """The folder of a release of TRL, fetched from PyPI if it is not there.

    Raises: UserError if pip cannot get it.
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
    """What a process that imports that release needs beside the variables of this one."""
    parts = [str(install_trl(version)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(parts), "TRL_EXPERIMENTAL_SILENCE": "1"}


def main() -> int:
    for version in VERSIONS:
        print(f"trl {version}: {install_trl(version).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
