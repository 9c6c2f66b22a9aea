"""Data of strangers: saved data sets and the cache of tokenised rows run nothing and stay where they are."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from data.config import DataOptions
from data.dataset import Recipe, open_datasets
from data.read.paths import TableConfig, is_hub_id, open_path
from rlhf.errors import UserError
from rlhf.storage import manifests
from rlhf.text.tokenizer import prepare_tokenizer
from tests.support import payloads, tiny


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is there if a payload ran; the current directory is beside it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ran"


def rows(path: str) -> list[Any]:
    return [record for _, record in open_path(path).records("train", TableConfig())]


# --- the cache of tokenised rows


def opened() -> Any:
    options = DataOptions(data_path=("x.jsonl",), data_cache="cache", data_split=(1, 0, 0))
    result = open_datasets(options, Recipe("sft"), prepare_tokenizer(tiny.tokenizer(), "plain"))
    return result.train[:], result.evaluation[:], result.train.lengths.tolist(), result.report


def write_objects(path: Path, ran: Path) -> None:
    """What numpy makes of an array of objects: a pickle with a header."""
    with path.open("wb") as file:
        np.save(file, np.array([payloads.Payload(ran)], dtype=object))


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "a pickle": lambda path, ran: payloads.write_plain(path, {}, ran),
    "a zipped pickle": lambda path, ran: payloads.write_zipped(path, {}, ran),
    "an array of objects": write_objects,
}


@pytest.mark.parametrize("kind", [*WRITERS, "nothing"])
@pytest.mark.parametrize("name", ["items-000-00000.arrow", "train.npy", "evaluation.npy", "report.json"])
def test_no_payload_in_the_cache_runs(name: str, kind: str, ran: Path) -> None:
    """A damaged file is named, with the cure."""
    Path("x.jsonl").write_text("".join(f'{{"prompt": "w{i}", "response": "w{i} w5"}}\n' for i in range(4, 60)))
    before = opened()
    [folder] = [path for path in Path("cache").iterdir() if path.is_dir()]
    assert folder.parent.stat().st_mode & 0o077 == 0
    (folder / name).write_bytes(b"") if kind == "nothing" else WRITERS[kind](folder / name, ran)
    with pytest.raises(UserError, match=f"{name}: damaged .*remove the directory {folder}"):
        opened()
    assert not ran.exists()
    shutil.rmtree(folder)
    assert opened() == before


def test_only_files_of_the_cache_that_were_written_since_are_hashed(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process opens it, and hashing 50 GB takes a minute."""
    Path("x.jsonl").write_text("".join(f'{{"prompt": "w{i}", "response": "w{i} w5"}}\n' for i in range(4, 60)))
    before, hashed, digest = opened(), list[str](), manifests.digest
    monkeypatch.setattr(manifests, "digest", lambda path: hashed.append(path.name) or digest(path))
    assert opened() == before and hashed == []
    [file] = Path("cache").glob("*/train.npy")
    os.utime(file, (1.0, 1.0))  # as a copy
    assert opened() == before and hashed == ["train.npy"]
    numbers = np.load(file)
    np.save(file, numbers[::-1])  # of the same size
    with pytest.raises(UserError, match=r"train\.npy: damaged"):
        opened()


# --- data sets as `datasets` saves them


@pytest.fixture
def saved(ran: Path) -> Path:
    datasets.Dataset.from_dict({"prompt": ["a"], "response": ["b"]}).save_to_disk("saved")
    return Path("saved")


@pytest.mark.parametrize("content", ["[]", "{}", '{"_data_files": 3}', '{"_data_files": []}'])
def test_a_saved_data_set_that_is_damaged_is_one_line(content: str, saved: Path) -> None:
    (saved / "state.json").write_text(content)
    with pytest.raises(UserError, match="saved: cannot be read"):
        rows("saved")


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "state.json", "dataset_info.json"])
def test_no_payload_in_a_saved_data_set_runs(name: str, saved: Path, ran: Path) -> None:
    payloads.write_plain(saved / name, {}, ran)
    with pytest.raises(UserError, match="saved: cannot be read"):
        rows("saved")
    assert not ran.exists()


def test_what_a_saved_data_set_asks_for_beside_data(saved: Path, ran: Path) -> None:
    payloads.edit_json(saved / "state.json", _format_type="custom", _format_kwargs={"transform": "os.system"})
    assert rows("saved") == [{"prompt": "a", "response": "b"}]
    info = json.loads((saved / "dataset_info.json").read_text())
    info["features"]["prompt"] = {"_type": "evil"}
    (saved / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="saved: cannot be read"):
        rows("saved")
    (saved / "evil.py").write_text(payloads.evil_module(ran))
    shutil.copy(saved / "evil.py", saved / "saved.py")  # as old loading scripts were named
    with pytest.raises(UserError, match="saved: cannot be read"):
        rows("saved")
    assert not ran.exists()


# --- places


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "../x",
        "owner/../name",
        "~/x",
        "a/b\0",
        "a/b/../../../etc/passwd",
        "file:///etc/passwd",
        "http://example.org/x.jsonl",
        "https://a/x.jsonl::file:///etc/passwd",
        "hf://datasets/x",
        "zip://a::b",
    ],
)
def test_a_path_is_local_or_a_hub_id(path: str, ran: Path) -> None:
    """Or a URL of the kinds in remote.py. Other addresses are refused; a path with `..` must exist."""
    assert not is_hub_id(path)
    with pytest.raises(UserError, match=r"expected \.json, \.jsonl"):
        rows(path)
