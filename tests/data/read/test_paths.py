"""Files, patterns, directories, saved datasets and the hub; what is not there is told with the way out.

No hub is asked: a directory stands for it, read by `datasets` itself.
"""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data.read.paths import TableConfig, data_files, is_hub_id, open_path, refuse_loading_script
from data.sources import files
from rlhf.errors import UserError
from rlhf.hub import offline

KINDS = ".json, .jsonl, .ndjson, .csv, .tsv, .parquet, .txt (.gz too)"
ROWS = [{"prompt": f"p{i}", "messages": [{"role": "user", "content": "é"}] * i, "n": i} for i in range(600)]
PLAIN = TableConfig()


def read(path: str, split: str = "train", config: TableConfig = PLAIN) -> list[Any]:
    return [record for _, record in open_path(path).records(split, config)]


def read_error(path: str, split: str = "train", config: TableConfig = PLAIN) -> str:
    with pytest.raises(UserError) as error:
        read(path, split, config)
    assert "\n" not in str(error.value)
    return str(error.value)


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n")


# --- files


def test_a_file_a_pattern_or_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(
        tmp_path, "data/b.jsonl", "data/a.json", "data/deep/c.jsonl", "data/README.md", "data/.cache/d.jsonl", "e.jsonl"
    )
    (tmp_path / "data/x.csv.gz").write_bytes(gzip.compress(b"text\nx\n"))
    assert data_files("e.jsonl") == [Path("e.jsonl")]
    assert [str(f) for f in data_files("data")] == ["data/a.json", "data/b.jsonl", "data/deep/c.jsonl", "data/x.csv.gz"]
    assert [str(f) for f in data_files("data/*")] == [str(f) for f in data_files("data")]
    assert [str(f) for f in data_files("data/*.json*")] == ["data/a.json", "data/b.jsonl"]
    assert [str(f) for f in data_files("data/**/[bc].jsonl")] == ["data/b.jsonl", "data/deep/c.jsonl"]
    assert [record["text"] for record in read("data/*.json*")] == ["data/a.json", "data/b.jsonl"]


def test_text_files_beside_data_are_no_data(tmp_path: Path) -> None:
    make(tmp_path, "LICENSE.txt", "sub/note.txt")
    assert len(data_files(str(tmp_path))) == 2
    make(tmp_path, "train.jsonl", "dataset_infos.json")
    assert data_files(str(tmp_path)) == [tmp_path / "train.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", f"got no path, expected a file ({KINDS}), a directory, or OWNER/NAME on the hub"),
        ("nothing.like.it", f"no such file or directory; expected {KINDS}"),
        ("/no/such/x.jsonl", f"no such file or directory; expected {KINDS}"),
        ("data/readme.md", f"got a '.md' file, expected {KINDS}"),
        ("data/*.csv", f"the pattern matches no data file; expected {KINDS}"),
        ("empty", f"a directory without data files; expected {KINDS}"),
    ],
)
def test_paths_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "data/train.jsonl", "data/readme.md", "empty/.hidden.jsonl")
    assert read_error(path) == (f"{path}: {message}" if path else message)


def test_hub_ids_and_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    for path in ("owner/name", "owner/na.me-2_x", "a/c", "owner/name@main", "owner/name@refs/convert/parquet"):
        assert is_hub_id(path)
    for path in (
        "a/b",
        "a/b@main",
        "./x",
        "../x",
        "/x",
        "x/y/z",
        "x/y.jsonl",
        "x/y.csv.gz",
        "x",
        "a/..",
        "a/b@..",
        "a/b@refs/../../x",
        "~/x",
        "x/*",
        "",
        "x/",
    ):
        assert not is_hub_id(path)


def test_a_file_has_no_splits_or_subsets(tmp_path: Path) -> None:
    make(tmp_path, "x.jsonl")
    path = str(tmp_path / "x.jsonl")
    message = read_error(path, config=TableConfig(split="test"))
    assert message.startswith(f"{path}: got split=test, expected none: files have no parts")
    assert "got data_dir=x" in read_error(path, config=TableConfig(data_dir="x"))


def test_a_loading_script_is_refused_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "squad.py"
    script.write_text("import datasets\nraise SystemExit\nclass Squad(datasets.GeneratorBasedBuilder):\n    pass\n")
    with pytest.raises(UserError) as error:
        refuse_loading_script(str(script))
    assert str(error.value) == read_error(str(script))
    assert "got a loading script of `datasets`, which is code and no longer run" in str(error.value)
    assert "OWNER/NAME@refs/convert/parquet" in str(error.value)
    own = tmp_path / "mine.py"
    own.write_text("def build(config, path): ...\n")
    refuse_loading_script(str(own))
    refuse_loading_script(str(tmp_path / "absent.py"))
    assert read_error(str(own)) == f"{own}: got a '.py' file, expected {KINDS}"


# --- fingerprints


def fingerprint(path: Path, split: str = "train", **options: Any) -> str:
    return open_path(str(path)).fingerprint(split, TableConfig(**options))


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    make(tmp_path / "one", "a.jsonl", "b.jsonl")
    make(tmp_path / "two", "a.jsonl", "b.jsonl")
    first = fingerprint(tmp_path / "one")
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two") == first
    assert fingerprint(tmp_path / "one", streaming=True) != first
    (tmp_path / "two/b.jsonl").write_text('{"text": "b.jsonk"}\n')
    assert fingerprint(tmp_path / "two") != first
    (tmp_path / "one/b.jsonl").rename(tmp_path / "one/b.ndjson")
    assert fingerprint(tmp_path / "one") != first
    make(tmp_path / "one", "b.jsonl")
    assert fingerprint(tmp_path / "one") != first


def test_content_does_not_move_between_files_unseen(tmp_path: Path) -> None:
    for name, parts in (("one", ("xx", "y")), ("two", ("x", "xy"))):
        (tmp_path / name).mkdir()
        for i, part in enumerate(parts):
            (tmp_path / name / f"{i}.txt").write_text(part)
    assert fingerprint(tmp_path / "one") != fingerprint(tmp_path / "two")


# --- saved by `datasets`


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(folder / "one"), num_shards=3)
    datasets.DatasetDict(train=whole, test=whole.select(range(5, 8))).save_to_disk(str(folder / "splits"))
    whole.with_format("numpy").save_to_disk(str(folder / "arrays"))
    return folder


def test_a_saved_dataset(saved: Path) -> None:
    for name in ("one", "arrays"):
        result = list(open_path(f"{saved}/{name}").records("train", PLAIN))
        assert [record for _, record in result] == ROWS
        assert [location for location, _ in result] == [f"{saved}/{name}:{i + 1}" for i in range(600)]
    message = read_error(f"{saved}/one", "test", TableConfig(split="test"))
    assert message == f"{saved}/one: got split=test, expected none: it was saved without splits"


def call(name: str, **arguments: object) -> dict[str, object]:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": arguments}]}
    return {"messages": [turn], "tools": [{"name": name, "parameters": {key: {"type": "text"} for key in arguments}}]}


def test_a_call_in_an_arrow_table_has_no_arguments_of_other_functions(tmp_path: Path) -> None:
    """Arrow stores {at: sky, a: null, b: null}; the template would write the nulls, and they would be learned."""
    rows = [call("look", at="sky"), call("add", a=1, b=[2, None])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("x.parquet", "saved"):
        assert read(f"{tmp_path}/{name}") == rows


def test_a_saved_dataset_with_splits(saved: Path) -> None:
    assert "got subset=x, expected none" in read_error(f"{saved}/splits", config=TableConfig(subset="x"))
    assert read(f"{saved}/splits") == ROWS
    assert read(f"{saved}/splits", "test") == ROWS[5:8]
    message = read_error(f"{saved}/splits", "tets")
    assert message == (
        f"{saved}/splits: no split 'tets'; have train, test (did you mean 'test'?); choose with split=NAME"
    )
    assert fingerprint(saved / "splits") == fingerprint(saved / "splits")
    assert fingerprint(saved / "splits") != fingerprint(saved / "splits", "test")


def test_the_fingerprint_of_a_saved_dataset_is_of_its_content(tmp_path: Path) -> None:
    for name, word in (("one", "a"), ("two", "b")):
        datasets.Dataset.from_list([{"text": word}]).save_to_disk(str(tmp_path / name))
    (tmp_path / "two/state.json").write_bytes((tmp_path / "one/state.json").read_bytes())
    assert fingerprint(tmp_path / "one") != fingerprint(tmp_path / "two")


def test_a_damaged_saved_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "x"))
    next((tmp_path / "x").glob("*.arrow")).write_bytes(b"no arrow")
    assert read_error(str(tmp_path / "x")).startswith(f"{tmp_path}/x: cannot be read: ")


# --- the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for the hub: `owner/name` is its directory `name`."""
    monkeypatch.setattr("data.read.paths.require_hub", lambda what: None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    for name in ("load_dataset", "load_dataset_builder", "get_dataset_config_names"):
        real = getattr(datasets, name)

        def local(hub_id: str, *, real: Any = real, **options: Any) -> Any:
            calls.append((hub_id, options))
            return real(str(tmp_path / hub_id.partition("/")[2]), **options)

        monkeypatch.setattr(datasets, name, local)
    calls: list[tuple[str, dict[str, Any]]] = []
    lines = [json.dumps({"prompt": str(i)}) + "\n" for i in range(5)]
    for file, count in (("parts/a/train.jsonl", 3), ("parts/a/test.jsonl", 1), ("parts/b/train.jsonl", 2)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("".join(lines[:count]))
    parts = [{"config_name": name, "data_dir": name} for name in ("a", "b")]
    (tmp_path / "parts/README.md").write_text(f"---\nconfigs: {json.dumps(parts)}\n---\n")
    make(tmp_path, "one/train.jsonl", "flat/deep/train.jsonl", "flat/other/train.jsonl", "script/script.py")
    return tmp_path


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_dataset(hub: Path, streaming: bool) -> None:
    config = TableConfig(subset="a", streaming=streaming)
    result = list(open_path("owner/parts").records("train", config))
    assert result == [(f"owner/parts/train:{i + 1}", {"prompt": str(i)}) for i in range(3)]
    assert read("owner/parts", "test", config) == [{"prompt": "0"}]
    deep = TableConfig(data_dir="deep", streaming=streaming)
    assert read("owner/flat", "train", deep) == [{"text": "flat/deep/train.jsonl"}]
    assert list((hub / "cache").rglob("*.arrow")) == [] or not streaming


@pytest.mark.parametrize(
    ("path", "config", "message"),
    [
        ("owner/parts", TableConfig(subset="b", split="test"), "no split 'test'; have train; choose with split=NAME"),
        (
            "owner/script",
            PLAIN,
            "got a loading script of `datasets`, which is code and no longer run; read the hub's conversion, "
            "owner/script@refs/convert/parquet, or download its files",
        ),
    ],
)
def test_what_the_hub_does_not_have(hub: Path, path: str, config: TableConfig, message: str) -> None:
    assert read_error(path, config.split or "train", config) == f"{path}: {message}"


def test_a_hub_dataset_that_is_not_there(hub: Path) -> None:
    assert read_error("owner/absent").startswith("owner/absent: cannot be loaded: Couldn't find any data file at")
    for config in (PLAIN, TableConfig(subset="aa")):  # `datasets` lists those that there are
        message = read_error("owner/parts", config=config)
        assert "['a', 'b']" in message and "; choose a subset with subset=NAME, or " in message
    assert "cannot be loaded: The directory at" in read_error("owner/one", config=TableConfig(data_dir="absent"))


def test_the_revision_is_requested(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda hub_id, **options: calls.append((hub_id, options)) or {"train": []}
    )
    assert read("owner/one@refs/convert/parquet", config=TableConfig(streaming=True)) == []
    assert calls[0][0] == "owner/one"
    assert calls[0][1]["revision"] == "refs/convert/parquet"


def test_the_fingerprint_of_a_hub_dataset_changes_with_it(hub: Path) -> None:
    path = open_path("owner/one")
    first = path.fingerprint("train", PLAIN)
    assert path.fingerprint("train", PLAIN) == first
    assert path.fingerprint("test", PLAIN) != first
    assert path.fingerprint("train", TableConfig(streaming=True)) != first
    (hub / "one/train.jsonl").write_text('{"text": "another"}\n')
    assert path.fingerprint("train", PLAIN) != first


def test_a_hub_that_does_not_answer_is_refused_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "data/train/x.jsonl")
    monkeypatch.setattr(offline.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(offline.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s to try again"))
    message = read_error("data/trian")
    assert message.startswith("data/trian: no such local path, and the hub at http://127.0.0.1:9 does not answer")
    assert "HF_HUB_OFFLINE=1" in message


def test_an_option_that_came_later_changes_no_earlier_fingerprint(tmp_path: Path) -> None:
    """Of no split, a split, and where it is set: a run of before resumes, one with another column does not."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n')

    def fingerprint(**options: str) -> str:
        return open_path(str(file)).fingerprint("train", files.Config(**options))

    before = repr(files.Config())
    assert "preferred_output" not in before and before.startswith("Config(split=None, ")
    assert fingerprint() == hashlib.sha256(before.encode() + b".jsonl" + _sha256(file)).hexdigest()
    values = [fingerprint(), *(fingerprint(**{name: "x"}) for name in ("preferred_output", "completions", "chosen"))]
    assert len({*values}) == 4


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
