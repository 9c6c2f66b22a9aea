"""Another user of the machine, who may write in the folder of temporary files, runs no code here."""

import getpass
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlhf import private_folders
from rlhf.errors import run_as_user

ROOT = Path(__file__).parents[2]
NOBODY = 65534
LOADS = """
def load(*_):
    from torch._inductor.codecache import CppCodeCache
    library = CppCodeCache.load('extern "C" int answer() { return 42; }', device_type="cpu")
    print("answer", library.answer())
"""
STAGE = """
from rlhf.training.stage_process import stage_main
from step1_sft.config import STAGE, SFTConfig
stage_main(["--model", "m", "--data-path", "d", "--output-dir", "out"], STAGE, lambda _: SFTConfig, load)
"""
PROGRAMS = {
    "a program": "from rlhf.errors import run_as_user\nrun_as_user(load)",
    "a stage": STAGE,
    "a program of a notebook": "import torch._dynamo\nfrom rlhf.errors import run_as_user\nrun_as_user(load)",
}


def python(program: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "GRADIO_TEMP_DIR", "TRITON_CACHE_DIR"):
        environment.pop(name, None)
    command = [sys.executable, "-c", LOADS + program]
    return subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True, check=False)


def plant(folder: Path, crime: Path) -> None:
    """A library that writes `crime` gets the name that ours will have, in torch's folder, which another user owns."""
    honest = folder / "honest"
    assert "answer 42" in python("load()", folder, TORCHINDUCTOR_CACHE_DIR=str(honest)).stdout
    attack = folder / "attack.c"
    attack.write_text(
        "#include <stdio.h>\nint answer() { return 13; }\n"
        f'__attribute__((constructor)) void run() {{ fclose(fopen("{crime}", "w")); }}\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "attack.so", attack], check=True)
    for library in honest.rglob("*.so"):
        target = folder / "tmp" / f"torchinductor_{getpass.getuser()}" / library.relative_to(honest)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "attack.so", target)
    for path in [folder / "tmp", *(folder / "tmp").rglob("*")]:
        path.chmod(0o777)
        if os.getuid() == 0:
            os.chown(path, NOBODY, NOBODY)


@pytest.mark.compiled
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_a_library_that_another_user_has_planted_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    crime = tmp_path / "crime"
    plant(tmp_path, crime)
    assert "answer 13" in python("load()", tmp_path).stdout  # the attack works on torch itself
    crime.unlink()
    for name, program in PROGRAMS.items():
        ran = python(program, tmp_path)
        assert "answer 42" in ran.stdout, (name, ran.stderr)
        assert not crime.exists(), name


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither folder is named; home and the folder of temporary files are empty."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "GRADIO_TEMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home").mkdir()
    return tmp_path


def folders() -> list[Path]:
    return [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "GRADIO_TEMP_DIR")]


def test_the_folders_are_in_the_home_and_private_whatever_the_umask_is(unset: Path) -> None:
    before = os.umask(0)
    try:
        private_folders.use()
        private_folders.use()
    finally:
        os.umask(before)
    assert [path.parent for path in folders()] == [unset / "home/.cache/rlhf-pipeline"] * 2
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders()] == [0o700] * 2


def test_what_the_user_has_set_stays(unset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(unset / "mine"))
    private_folders.use()
    assert folders()[0] == unset / "mine"


@pytest.mark.parametrize("home", ["", "file"])
def test_without_a_home_they_are_private_folders_among_temporary_files(
    home: str, unset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unset / "file").touch()
    monkeypatch.setenv("HOME", home and str(unset / home))
    monkeypatch.setattr(os.path, "expanduser", lambda path: (home and str(unset / home)) or path)
    private_folders.use()
    own = unset / "tmp" / f"rlhf-pipeline-{os.getuid()}"
    assert [path.parent for path in folders()] == [own] * 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in (own, *folders())} == {0o700}


@pytest.mark.parametrize("attack", ["mode", "link", "owner"])
def test_a_folder_of_another_user_is_refused(attack: str, unset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private_folders.use()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "GRADIO_TEMP_DIR"):
        path = Path(os.environ.pop(name))
    if attack == "mode":
        path.chmod(0o777)
    elif attack == "link":
        path.rename(unset / "elsewhere")
        path.symlink_to(unset / "elsewhere")
    elif os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        pytest.skip("only root can give a folder away")
    assert run_as_user(lambda: 0) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {path}: ") and "GRADIO_TEMP_DIR" in line and line.count("\n") == 1
