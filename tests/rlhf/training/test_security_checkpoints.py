"""Checkpoints that somebody has changed: nothing in them runs, and what is not as it was written is not read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from rlhf.errors import UserError
from rlhf.storage import manifests
from rlhf.training import checkpoints
from tests.support import engine_runs, payloads, resuming

pytestmark = pytest.mark.usefixtures("ranks")

WEIGHTS = "policy.rank-0.part-0.safetensors"  # with AdamW's moments
FILES = (WEIGHTS, "rng.rank-0.json", "state.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage's directory with a checkpoint of one optimizer step."""
    stage = tmp_path_factory.mktemp("stage")
    engine = resuming.with_dropout({"zero_stage": 1})
    engine_runs.step(engine, engine_runs.batches()[0])
    assert checkpoints.save(stage, 1, resuming.state_of(engine), resuming.ABOUT, 2) is None
    return stage


@pytest.fixture
def stage(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    shutil.copytree(written, tmp_path / "stage")
    return tmp_path / "stage"


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A directory that is there if a payload ran."""
    return tmp_path / "ran"


def folder_of(stage: Path) -> Path:
    folder = checkpoints.folder_of(stage, 1)
    assert set(FILES) < {path.name for path in folder.iterdir()}
    return folder


def restore(stage: Path) -> None:
    checkpoint = checkpoints.newest(stage)
    assert checkpoint is not None
    checkpoint.restore(resuming.state_of(resuming.with_dropout({"zero_stage": 1})), seed=0)


def test_strays_in_a_checkpoint_are_ignored(stage: Path, ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(stage)
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "pytorch_model.bin", "rng.pkl")
    for name in (*names, "policy.rank-1.part-0.safetensors", "rng.rank-1.json", ".metadata", "latest"):
        payloads.write_plain(folder / name, {}, ran)
    (folder / "__init__.py").write_text(payloads.evil_module(ran))
    (folder.parent / "latest").write_text("../../evil")
    restore(stage)
    assert not ran.exists()
    assert f"{folder}: ignored" in (output := capsys.readouterr().out) and "rng.pkl" in output


PAYLOADS = [*((WEIGHTS, kind) for kind in payloads.WRITERS), *((name, "a plain pickle") for name in FILES[1:])]
"""every kind, and every file"""


@pytest.mark.parametrize(("name", "kind"), PAYLOADS)
def test_a_pickle_that_the_manifest_vouches_for_does_not_run(stage: Path, ran: Path, name: str, kind: str) -> None:
    """Who can write there can write the manifest too: sha256 tells accidents, and the formats keep code out."""
    folder = folder_of(stage)
    payloads.WRITERS[kind](folder / name, {}, ran)
    manifest = json.loads((folder / manifests.MANIFEST).read_text())
    manifest["files"][name] = manifests.digest(folder / name)
    manifest["sha256"] = manifests.content_digest(manifest)
    (folder / manifests.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises((UserError, SafetensorError, ValueError)):
        restore(stage)
    assert not ran.exists()


@pytest.mark.parametrize("value", [7, {}])
@pytest.mark.parametrize("name", ["rng.rank-0.json", "state.json"])
def test_values_of_other_types_are_one_line(stage: Path, name: str, value: Any) -> None:
    """As a later version of this program, or a person, may write them."""
    folder = folder_of(stage)
    old = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(dict.fromkeys(old, value) if name == "state.json" else value))
    manifest = json.loads((folder / manifests.MANIFEST).read_text())
    manifest["files"][name] = manifests.digest(folder / name)
    manifest["sha256"] = manifests.content_digest(manifest)
    (folder / manifests.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"the stage cannot resume from it \(.*--overwrite"):
        restore(stage)


@pytest.mark.parametrize("entry", ["files", "logs"])
@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/passwd"])
def test_a_manifest_names_files_of_its_stage_only(
    stage: Path, name: str, entry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder_of(stage) / manifests.MANIFEST
    manifest = json.loads(path.read_text())
    manifest[entry][name] = {"size": 1, "sha256": "0" * 64} if entry == "files" else 1
    manifest["sha256"] = manifests.content_digest(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="all checkpoints there are damaged"):
        restore(stage)
    assert f"names the file {name!r}" in capsys.readouterr().out
