"""Private folders for what libraries would keep in the folder of temporary files, where every user may write.

torch loads and runs the libraries that it finds in /tmp/torchinductor_USER, and Gradio serves the files in /tmp/gradio,
no matter who has put them there. Torch-free, because torch looks for the folder while it is imported.
"""

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from pathlib import Path


def use() -> None:
    """From now on, libraries in this process and its children use private folders; what the user has set stays.

    Triton's folder is inside torch's. Raises: OSError if a folder is another user's.
    """
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", f"compiled-{_cpu()}"), ("GRADIO_TEMP_DIR", "gradio")):
        value = os.environ.get(variable, "")
        # torch sets the variable itself, in a notebook or launcher that has imported it before
        if not value or (os.path.dirname(value) == tempfile.gettempdir() and "torchinductor_" in value):
            os.environ[variable] = str(_folder(name, variable))


def _folder(name: str, variable: str) -> Path:
    """A folder in the user's cache; without a home that can be written, in the folder of temporary files."""
    cache = Path(os.path.expanduser("~"), ".cache", "rlhf-pipeline")
    try:
        if not cache.is_absolute():  # this user has no home
            raise FileNotFoundError
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        (cache / name).mkdir(mode=0o700, exist_ok=True)
    except OSError:
        cache = Path(tempfile.gettempdir()) / f"rlhf-pipeline-{os.getuid()}"
        cache.mkdir(mode=0o700, exist_ok=True)
        _require_private(cache, variable)
        (cache / name).mkdir(mode=0o700, exist_ok=True)
    _require_private(cache / name, variable)
    return cache / name


def _require_private(path: Path, variable: str) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        cure = f"another user owns it or may write there; delete it, or set {variable} to a folder of yours"
        raise PermissionError(errno.EPERM, cure, str(path))


def _cpu() -> str:
    """A digest of the kind of CPU: hosts that share a home have different ones, and code for one may crash another."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # other systems have no such file
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        lines = [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
