"""Data of strangers: files, saved data sets and the cache of tokenised rows run nothing and stay where they are."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors import SafetensorError

from data.config import DataOptions
from data.dataset import Recipe, open_datasets
from data.read.paths import TableConfig, is_hub_id, open_path
from rlhf.errors import UserError
from rlhf.text.tokenizer import prepare_tokenizer
from tests.support import payloads, tiny

DAMAGED = (UserError, OSError, ValueError, LookupError, EOFError, SafetensorError, pyarrow.ArrowException)


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


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", ["items.arrow", "train.npy", "evaluation.npy", "report.json"])
def test_no_payload_in_the_cache_runs(name: str, kind: str, ran: Path) -> None:
    Path("x.jsonl").write_text("".join(f'{{"prompt": "w{i}", "response": "w{i} w5"}}\n' for i in range(4, 60)))
    opened()
    [folder] = [path for path in Path("cache").iterdir() if path.is_dir()]
    WRITERS[kind](folder / name, ran)
    with pytest.raises(DAMAGED):
        opened()
    assert not ran.exists()


def test_strays_in_the_cache_are_not_opened(ran: Path) -> None:
    Path("x.jsonl").write_text("".join(f'{{"prompt": "w{i}", "response": "w{i} w5"}}\n' for i in range(4, 60)))
    before = opened()
    [folder] = [path for path in Path("cache").iterdir() if path.is_dir()]
    for name in ("items.pkl", "state.pt", "train.pkl", "dataset_info.json", "cache-1.arrow"):
        payloads.write_plain(folder / name, {}, ran)
    (folder / "__init__.py").write_text(payloads.evil_module(ran))
    assert opened() == before and not ran.exists()


# --- data files


@pytest.mark.parametrize("suffix", ["jsonl", "json", "ndjson", "csv", "tsv", "txt", "parquet", "jsonl.gz"])
def test_no_payload_in_a_data_file_runs(suffix: str, ran: Path) -> None:
    """As text a pickle is a bad row or a poor document; what it asks for is not done."""
    for protocol in (0, 4):
        Path(f"x.{suffix}").write_bytes(pickle.dumps(payloads.Payload(ran), protocol=protocol))
        try:
            result = rows(f"x.{suffix}")
        except UserError as error:
            assert f"x.{suffix}" in str(error)
        else:
            assert all(getattr(one, "bad", True) for one in result)
    assert not ran.exists()


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "pt", "pth", "bin", "npy", "npz", "arrow", "zip", "tar", "py"])
def test_other_files_are_no_data(suffix: str, ran: Path) -> None:
    payloads.write_plain(Path(f"x.{suffix}"), {}, ran)
    with pytest.raises(UserError, match=rf"x\.{suffix}: got a '\.{suffix}' file"):
        rows(f"x.{suffix}")
    Path("folder").mkdir()
    Path(f"x.{suffix}").rename(f"folder/x.{suffix}")
    with pytest.raises(UserError, match="folder: a directory without data files"):
        rows("folder")
    assert not ran.exists()


def test_a_parquet_column_whose_type_is_a_pickle(ran: Path) -> None:
    """Older versions of Arrow made the type by unpickling it (CVE-2023-47248)."""
    extension = {"ARROW:extension:name": "arrow.py_extension_type"}
    extension["ARROW:extension:metadata"] = pickle.dumps(payloads.Payload(ran))
    columns = [pyarrow.field("prompt", pyarrow.string(), metadata=extension), ("response", pyarrow.string())]
    table = pyarrow.table({"prompt": ["a"], "response": ["b"]}, schema=pyarrow.schema(columns))
    pyarrow.parquet.write_table(table, "x.parquet")
    assert rows("x.parquet") == [{"prompt": "a", "response": "b"}]
    assert not ran.exists()


# --- data sets as `datasets` saves them


@pytest.fixture
def saved(ran: Path) -> Path:
    datasets.Dataset.from_dict({"prompt": ["a"], "response": ["b"]}).save_to_disk("saved")
    return Path("saved")


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
