"""A directory, such as a clone of a hub dataset, is read as the hub dataset is; `datasets` itself is the oracle."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from data.prepare.mixture import open_origin, parse_data_path
from data.read.paths import TableConfig, open_path
from data.read.records import Skipped
from rlhf.errors import UserError
from rlhf.types import Row


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines, encoding="utf-8")


def pair(text: str) -> dict[str, str]:
    return {side: f"\n\nHuman: {text}\n\nAssistant: {side} {text}" for side in ("chosen", "rejected")}


def static(text: str) -> dict[str, str]:
    prompt = f"\n\nHuman: {text}\n\nAssistant:"
    return {"prompt": prompt, "response": " good", "chosen": " good", "rejected": f" bad {text}"}


def post(text: str) -> dict[str, Any]:
    refs = {"human_ref_A": f"good {text}", "human_ref_B": f"bad {text}"}
    return {"post_id": text, "domain": text, "history": f"ask {text}", **refs, "labels": 1, "score_ratio": 3.0}


SHARD = "-00000-of-00001-0a1b.parquet"
HH_PARTS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
CLONES: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    "Dahoas/rm-static": (static, (f"data/train{SHARD}", f"data/test{SHARD}")),
    "stanfordnlp/SHP": (post, tuple(f"ask{a}/{b}.json" for a in "xy" for b in ("train", "validation", "test"))),
    "Anthropic/hh-rlhf": (pair, tuple(f"{part}/{split}.jsonl.gz" for part in HH_PARTS for split in ("train", "test"))),
}
RED_TEAM = "red-team-attempts/red_team_attempts.jsonl.gz"


def clone(folder: Path, hub_id: str) -> Path:
    """What `git clone` of the dataset gives: two rows a file, whose texts name it."""
    row, files = CLONES[hub_id]
    for file in files:
        write(folder / file, [row(f"{file} {i}") for i in range(2)])
    if hub_id == "Anthropic/hh-rlhf":
        write(folder / RED_TEAM, [{"transcript": "\n\nHuman: x\n\nAssistant: y", "rating": 4}])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    (folder / ".git").mkdir()
    url = f"https://huggingface.co/datasets/{hub_id}"
    (folder / ".git/config").write_text(f'[core]\n\tbare = false\n[remote "origin"]\n\turl = {url}\n\tfetch = +x\n')
    return folder


def records(folder: Path, split: str | None, **options: Any) -> tuple[list[Any], list[str]]:
    """The records, and why others are left out."""
    config = TableConfig(split=split, **options)
    entries = [record for _, record in open_path(str(folder)).records(split or "train", config)]
    return [r for r in entries if not isinstance(r, Skipped)], [r.reason for r in entries if isinstance(r, Skipped)]


@pytest.mark.parametrize("hub_id", CLONES)
def test_a_clone_has_the_splits_of_the_hub(hub_id: str, tmp_path: Path) -> None:
    """Of all its files, and of each directory that can be named."""
    folder = clone(tmp_path / "it", hub_id)
    datasets.disable_progress_bars()
    directories = {file.split("/")[0] for file in CLONES[hub_id][1] if file.count("/")} - {"data"}
    for data_dir in (None, *sorted(directories)):
        expected = datasets.load_dataset(str(folder), data_dir=data_dir, cache_dir=str(tmp_path / "cache"))
        for split in expected:
            rows, left_out = records(folder, split, data_dir=data_dir)
            assert rows == list(expected[split]), (data_dir, split)
            red_team = hub_id == "Anthropic/hh-rlhf" and data_dir is None
            assert left_out == ([f"file of no split: {RED_TEAM}"] if red_team else [])
        with pytest.raises(UserError, match=f"no split 'tset'; have {', '.join(expected)}"):
            records(folder, "tset", data_dir=data_dir)
    assert records(folder, None)[0] == list(
        datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))["train"]
    )


@pytest.mark.parametrize("hub_id", CLONES)
def test_a_clone_is_read_by_the_source_of_the_dataset(hub_id: str, tmp_path: Path) -> None:
    """By the address in .git/config, or by a path that ends in OWNER/NAME."""
    folder = clone(tmp_path / "any name", hub_id)
    copy = tmp_path / hub_id
    copy.parent.mkdir()
    (tmp_path / "any name/.git").rename(tmp_path / "away")
    folder.rename(copy)
    by_name, row = open_origin(str(copy)), CLONES[hub_id][0]
    (tmp_path / "away").rename(copy / ".git")
    copy.rename(folder)
    by_address = open_origin(str(folder))
    assert parse_data_path(str(folder))[0] != "files"
    assert by_address.source.parse is not None and type(by_name.source) is type(by_address.source)  # type: ignore[attr-defined]
    rows = [row for row in by_address.rows("reward") if isinstance(row, Row)]
    trained = [file for file in CLONES[hub_id][1] if "train" in file]
    assert len(rows) == 2 * len(trained) and row is not None
    assert all("good" in (each.response or "") or "chosen" in (each.response or "") for each in rows)


def test_the_subsets_of_a_card(tmp_path: Path) -> None:
    """As `datasets` reads the card; files elsewhere that a card names are not read."""
    for part in ("a", "b"):
        for split in ("train", "test"):
            write(tmp_path / f"{part}/{split}.jsonl", [{"text": f"{part} {split}"}])
    write(tmp_path / "more.jsonl", [{"text": "more"}])
    configs: list[dict[str, Any]] = [
        {"config_name": "first", "data_files": [{"split": "train", "path": ["a/*.jsonl", "more.jsonl"]}]},
        {"config_name": "second", "data_dir": "b"},
    ]
    card = tmp_path / "README.md"
    card.write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    datasets.disable_progress_bars()
    for subset in ("first", "second"):
        expected = datasets.load_dataset(str(tmp_path), subset, cache_dir=str(tmp_path / ".cache"))
        for split in expected:
            rows = records(tmp_path, split, subset=subset)[0]
            assert sorted(map(str, rows)) == sorted(map(str, expected[split]))
    for options, message in (
        ({}, r"\['first', 'second'\].*; choose a subset with subset=NAME"),
        ({"subset": "secnd"}, r"\['first', 'second'\].*; choose a subset with subset=NAME"),
        ({"data_dir": "c"}, "data_dir: got 'c', expected a directory in it"),
        ({"data_dir": "../x"}, "data_dir: got '../x', expected a directory in it"),
    ):
        with pytest.raises(UserError, match=message):
            records(tmp_path, None, **options)
    secret = tmp_path.parent / f"{tmp_path.name}.jsonl"
    write(secret, [{"text": "secret"}])
    for path in (f"../{secret.name}", str(secret)):
        configs = [{"config_name": "default", "data_files": [path, "more.jsonl"]}]
        card.write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
        assert records(tmp_path, None)[0] == [{"text": "more"}]
    card.write_text("---\nconfigs: 3\n---\n")
    with pytest.raises(UserError, match=r"cannot be loaded: Expected configs to be a list"):
        records(tmp_path, None)


def test_files_without_names_of_splits_are_all_read(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    assert records(tmp_path, None) == ([{"text": "x"}] * 2, [])
    assert [*open_path(str(tmp_path)).records("train_sft", TableConfig())] != []  # of a source with splits of its own
    before = open_path(str(tmp_path)).fingerprint("train", TableConfig())
    (tmp_path / "two.jsonl").write_text('{"text": "y"}\n')
    assert open_path(str(tmp_path)).fingerprint("train", TableConfig()) != before
    (tmp_path / "three.csv").write_text("text\nx\n")
    with pytest.raises(UserError, match=r"got three\.csv beside \.jsonl files, expected files of one format; name its"):
        records(tmp_path, None)


# --- the hub's local caches, offline


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()
    return tmp_path


def test_what_the_hub_client_has_downloaded_is_read_offline(offline: Path) -> None:
    """HF_HOME/hub, as `hf download --repo-type dataset` fills it."""
    repository = offline / "hub/datasets--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = repository / f"snapshots/{commit}/data"
    folder.mkdir(parents=True)
    for split, text in (("train", "a"), ("test", "b")):  # links to files that are named by their digests
        write(repository / f"blobs/{text}", [{"text": text}])
        (folder / f"{split}.jsonl").symlink_to(f"../../../blobs/{text}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    for split, text in (("train", "a"), ("test", "b")):
        path = open_path("owner/name")
        assert [record for _, record in path.records(split, TableConfig())] == [{"text": text}]
        assert path.fingerprint(split, TableConfig()) == open_path(f"owner/name@{commit}").fingerprint(
            split, TableConfig()
        )
    with pytest.raises(UserError, match="owner/other: cannot be loaded"):
        list(open_path("owner/other").records("train", TableConfig()))


def test_what_datasets_has_prepared_is_read_offline(offline: Path) -> None:
    """HF_HOME/datasets, as an earlier `load_dataset` of the hub id leaves it."""
    write(offline / "name/train.jsonl", [{"text": "a"}, {"text": "b"}])
    loaded = datasets.load_dataset(str(offline / "name"), cache_dir=str(offline / "made"))["train"]
    folder = offline / "datasets/owner___name/default/0.0.0/0123456789abcdef"
    folder.parent.mkdir(parents=True)
    prepared = Path(loaded.cache_files[0]["filename"])
    prepared.parent.rename(folder)
    (folder / prepared.name).rename(folder / "name-train.arrow")
    path = open_path("owner/name")
    assert [record for _, record in path.records("train", TableConfig())] == [{"text": "a"}, {"text": "b"}]
    assert path.fingerprint("train", TableConfig())
