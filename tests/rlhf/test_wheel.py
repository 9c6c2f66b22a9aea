"""The wheel holds everything: `rlhf train` works from an empty directory, without the repository."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("rlhf", "data", "step1_sft", "step2_reward", "step3_ppo", "configs", "docs", "setup.py", "pyproject.toml",
           "README.md", "LICENSE")  # fmt: skip
TINY = (
    "--data-path", "demo,rows=400", "--max-eval-rows", "8", "--sft.num-train-epochs", "1",
    "--reward.num-train-epochs", "1", "--ppo.total-episodes", "64", "--ppo.batch-size", "64",
    "--ppo.rollout-batch-size", "64", "--output-dir", "out",
)  # fmt: skip
WITHOUT_CHECKOUT = 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "Editable" not in repr(f)]\n'
"""sitecustomize.py: the environment of the tests has the checkout installed as editable"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would put into site-packages. Built from a copy: building leaves files behind in its tree."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "-w", "wheels", ".", cwd=tree)
    [wheel] = (tree / "wheels").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "sitecustomize.py").write_text(WITHOUT_CHECKOUT)
    return site


@pytest.mark.long
def test_the_wheel_has_every_file_of_the_packages(installed: Path) -> None:
    for name in SOURCES[:6]:
        inside = installed / ("rlhf/configs" if name == "configs" else name)
        files = {str(path.relative_to(ROOT / name)) for path in (ROOT / name).rglob("*") if path.is_file()}
        files = {file for file in files if "__pycache__" not in file and not file.endswith(".md")}
        assert {str(path.relative_to(inside)) for path in inside.rglob("*") if path.is_file()} >= files, name
    top = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert top == {*SOURCES[:5], "sitecustomize.py"}


@pytest.mark.long
def test_the_console_script_trains_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    [scripts] = installed.glob("*.dist-info/entry_points.txt")
    entries = configparser.ConfigParser()
    entries.read(scripts)
    module, function = entries["console_scripts"]["rlhf"].split(":")
    program = f"import sys; from {module} import {function} as run; sys.exit(run())"
    rlhf = (sys.executable, "-P", "-c", program)
    environment = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "RLHF_CACHE": str(tmp_path / "cache")}
    where = "import data, rlhf, step3_ppo; print(*(m.__file__ for m in (data, rlhf, step3_ppo)))"
    for file in run(sys.executable, "-P", "-c", where, cwd=tmp_path, **environment).split():
        assert Path(file).is_relative_to(installed)
    output = run(*rlhf, "train", *TINY, cwd=tmp_path, **environment)
    assert "next: rlhf chat out" in output
    manifest = json.loads((tmp_path / "out/step3_ppo/manifest.json").read_text())
    assert "eval_kl" in manifest["metrics"] and (tmp_path / "out/step3_ppo/actor").is_dir()
    assert "held-out prompts, a mean gain of" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    again = run(*rlhf, "train", "--output-dir", "out", cwd=tmp_path, **environment)
    assert again.count("already complete in out, skipped") == 3
    changed = ("train", "--config", "configs/overlays/lora.yaml", "--print-config", "--changed")
    assert "adapter: lora" in run(*rlhf, *changed, cwd=tmp_path, **environment)
