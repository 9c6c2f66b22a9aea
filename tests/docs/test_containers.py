"""Dockerfile, environment.yml and the two files of constraints agree with pyproject.toml."""

import json
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
EXTRAS = {"gguf", "sentiment", "tensorboard"}
"""the extras that need no service and no GPU; vllm does not go with constraints.txt"""


def test_python_is_the_one_of_the_constraints() -> None:
    [version] = re.findall(r"with Python (3\.\d+)", CONSTRAINTS)
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.MULTILINE) == [f"python:{version}-slim"]
    assert f"python={version}" in ENVIRONMENT["dependencies"] and PROJECT["requires-python"] == f">={version}"


def test_both_install_the_same_extras_with_the_constraints() -> None:
    [from_pip] = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    [constraint, project] = from_pip
    assert constraint == "-c constraints.txt" and "-c /opt/rlhf/constraints.txt" in DOCKERFILE
    for text, path in ((project, r"-e \."), (DOCKERFILE, "/opt/rlhf")):
        [extras] = re.findall(rf"{path}\[(.*?)\]", text)
        assert set(extras.split(",")) == EXTRAS <= PROJECT["optional-dependencies"].keys()
    assert "COPY . /opt/rlhf" in DOCKERFILE and re.search(r"^torch==", CONSTRAINTS, re.MULTILINE)


def test_a_bound_is_a_version_that_the_suite_runs_with() -> None:
    oldest = (ROOT / "tests/constraints-oldest.txt").read_text(encoding="utf-8")
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE))
    installed = dict(re.findall(r"^([\w-]+)==([\d.]+)", oldest.lower(), re.MULTILINE))
    assert bounds.keys() == installed.keys()
    for name, version in bounds.items():
        assert f"{installed[name]}.".startswith(f"{version}."), name


def test_the_image_starts_the_programs_of_the_project() -> None:
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    assert json.loads(entry)[0] in PROJECT["scripts"]


def test_no_file_names_the_host_of_a_registry() -> None:
    for name in ("Dockerfile", "environment.yml", ".dockerignore"):
        assert "://" not in (ROOT / name).read_text(encoding="utf-8"), name
