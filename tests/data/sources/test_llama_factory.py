"""Entries of LLaMA-Factory's dataset_info.json: rows written by hand for each of its formats, and refused keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.prepare.mixture import open_origin, parse_data_path
from data.read.records import Phase, Skipped
from rlhf.errors import UserError
from rlhf.types import Message, Row

Q = (Message("user", "q"),)
SYSTEM = Message("system", "s")
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]
RENAMED = {"prompt": "ask", "query": "more", "response": "reply", "system": "sys", "history": "old"}
PAIR = {"prompt": "ask", "chosen": "yes", "rejected": "no"}
CALL = Message(
    "assistant", "", {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"n": 1}}}]}
)
TOOLS = {"tools": [{"type": "function", "function": {"name": "look"}}]}
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}

FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any], Phase, list[Row | Skipped]]] = {
    "alpaca without a list of columns": (
        {},
        {"instruction": "do", "input": "this", "output": "good", "id": 7},
        "sft",
        [Row((Message("user", "do\nthis"),), "good", None, "do\nthis", {"id": 7})],
    ),
    "alpaca without a column of inputs": (
        {},
        {"instruction": "q", "output": "good"},
        "sft",
        [Row(Q, "good", None, "q")],
    ),
    "alpaca, columns renamed": (
        {"columns": RENAMED},
        {"ask": "b", "more": "c", "reply": "good", "sys": "s", "old": [["q", "a"]], "input": "not this", "n": 1},
        "sft",
        [Row((SYSTEM, *Q, Message("assistant", "a"), Message("user", "b\nc")), "good", None, "q", {"n": 1})],
    ),
    "alpaca, nulls": (
        {"columns": RENAMED},
        {"ask": "q", "more": None, "reply": "good", "sys": None, "old": None},
        "sft",
        [Row(Q, "good", None, "q")],
    ),
    "alpaca, prompts only": (
        {"columns": {"prompt": "ask"}},
        {"ask": "q", "id": 7},
        "ppo",
        [Row(Q, None, None, "q", {"id": 7})],
    ),
    "alpaca, ranking": (
        {"ranking": True, "columns": PAIR},
        {"ask": "q", "yes": "good", "no": "bad"},
        "reward",
        [Row(Q, "good", "bad", "q")],
    ),
    "alpaca, ranking by a list": (
        {"ranking": True, "columns": {"prompt": "instruction", "response": "output"}},
        {"instruction": "q", "output": ["good", "bad"]},
        "reward",
        [Row(Q, "good", "bad", "q")],
    ),
    "alpaca, kto": (
        {"columns": {"prompt": "ask", "response": "reply", "kto_tag": "ok"}},
        {"ask": "q", "reply": "bad", "ok": False},
        "sft",
        [Skipped("labelled bad")],
    ),
    "sharegpt without a list of columns": (
        {"formatting": "sharegpt"},
        {"conversations": SHARED},
        "sft",
        [Row(Q, "good", None, "q")],
    ),
    "sharegpt, a system column": (
        {"formatting": "sharegpt", "columns": {"messages": "turns", "system": "sys"}},
        {"turns": SHARED, "sys": "s", "conversations": "not this"},
        "sft",
        [Row((SYSTEM, *Q), "good", None, "q")],
    ),
    "sharegpt, a system turn precedes the column": (
        {"formatting": "sharegpt", "columns": {"messages": "turns", "system": "sys"}},
        {"turns": [{"from": "system", "value": "s"}, *SHARED], "sys": "other"},
        "sft",
        [Row((SYSTEM, *Q), "good", None, "q")],
    ),
    "sharegpt, other tags": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "m"},
            "tags": {
                "role_tag": "who",
                "content_tag": "says",
                "user_tag": "A",
                "assistant_tag": "B",
                "system_tag": "C",
            },
        },
        {"m": [{"who": "C", "says": "s"}, {"who": "A", "says": "q"}, {"who": "B", "says": "good"}]},
        "sft",
        [Row((SYSTEM, *Q), "good", None, "q")],
    ),
    "sharegpt, ranking": (
        {
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
        {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": {"from": "gpt", "value": "bad"}, "margin": 2},
        "reward",
        [Row(Q, "good", "bad", "q", {"margin": 2.0})],
    ),
    "sharegpt, kto": (
        {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": OPENAI},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}], "label": True},
        "sft",
        [Row(Q, "good", None, "q")],
    ),
    "sharegpt, tools": (
        {"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "functions"}},
        {
            "conversations": [
                SHARED[0],
                {"from": "function_call", "value": '[{"name": "look", "arguments": {"n": 1}}]'},
                {"from": "observation", "value": "42"},
                SHARED[1],
            ],
            "functions": '[{"name": "look"}]',
        },
        "sft",
        [Row((*Q, CALL, Message("tool", "42")), "good", None, "q", variables=TOOLS)],
    ),
    "openai, tools": (
        {"formatting": "openai", "columns": {"messages": "messages", "tools": "tools"}},
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", **CALL.keys},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "good", "reasoning_content": "r"},
            ],
            "tools": TOOLS["tools"],
        },
        "sft",
        [
            Row(
                (*Q, CALL, Message("tool", "42")),
                *("good", None, "q"),
                variables=TOOLS,
                response_keys={"reasoning_content": "r"},
            )
        ],
    ),
    "openai": (
        {"formatting": "openai", "columns": {"messages": "messages"}},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}]},
        "sft",
        [Row(Q, "good", None, "q")],
    ),
}


def write(folder: Path, entry: dict[str, Any], *records: dict[str, Any]) -> str:
    """The data path of one entry, whose file is beside dataset_info.json."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.jsonl"} | entry}))
    return f"{folder / 'dataset_info.json'}:mine"


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_each_format(name: str, tmp_path: Path) -> None:
    entry, record, phase, expected = FORMATS[name]
    assert list(open_origin(write(tmp_path, entry, record)).rows(phase)) == expected


def test_another_entry_is_another_dataset(tmp_path: Path) -> None:
    record = {"instruction": "q", "output": "good", "n": "x"}
    fingerprints = set()
    for entry in ({}, {"columns": {"prompt": "instruction", "response": "n"}}):
        source = open_origin(write(tmp_path, entry, record)).source
        assert source.fingerprint is not None
        fingerprints.add(source.fingerprint("sft"))
    assert len(fingerprints) == 2


def test_a_dataset_on_the_hub_keeps_its_part(tmp_path: Path) -> None:
    entry = {"hf_hub_url": "a/b", "ms_hub_url": "c/d", "subset": "x", "split": "test", "folder": "y", "revision": "v1"}
    write(tmp_path, entry)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"hub": entry}))
    source: Any = open_origin(f"{tmp_path / 'dataset_info.json'}:hub").source
    assert source.remote and source.reader.hub_id == "a/b" and source.reader.revision == "v1"
    config = source.config
    assert (config.subset, config.split, config.data_dir) == ("x", "test", "y")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"formating": "sharegpt"}, r"mine: .*'formating'.*did you mean 'formatting'"),
        ({"columns": {"prompt": "q", "images": "pictures"}}, "no option 'columns.images'"),
        ({"file_name": None, "ms_hub_url": "a/b"}, "no option 'ms_hub_url'"),
        ({"file_name": None}, "names no data; expected file_name"),
        ({"file_name": "other.jsonl"}, r"other.jsonl: no such file"),
        ({"formatting": "sharegpt", "ranking": True}, "columns has no 'chosen'"),
        ({"formatting": "sharegpt", "columns": {"prompt": "q"}}, "columns has no 'messages'"),
    ],
)
def test_a_mistaken_entry_is_refused_by_its_key(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, entry, {"instruction": "q", "output": "good"})
    with pytest.raises(UserError, match=message) as error:
        open_origin(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "record", "message"),
    [
        ({"columns": RENAMED}, {"ask": "q", "reply": "x"}, "rows.jsonl:1: no column 'more'; have ask, reply"),
        (
            {"formatting": "sharegpt"},
            {"conversations": [{"from": "user", "value": "q"}]},
            "conversations[0]: got the role \"user\", expected 'system' or 'human' or 'gpt'",
        ),
        ({"ranking": True}, {"instruction": "q", "input": "", "output": "a"}, 'output: got "a", expected a list of'),
        (
            {"formatting": "sharegpt"},
            {"conversations": [{"role": "human", "content": "q"}]},
            "expected a message {from, value}",
        ),
        (
            {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "ok"}},
            {"instruction": "q", "output": "a", "ok": "yes"},
            'ok: got "yes", expected true, false or null',
        ),
    ],
)
def test_a_row_that_does_not_fit_the_entry(
    entry: dict[str, Any], record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (row,) = open_origin(write(tmp_path, entry, record)).rows("sft")
    assert isinstance(row, Skipped) and row.bad and message in row.reason


@pytest.mark.parametrize(
    ("data_path", "source", "weight"),
    [
        ("a/dataset_info.json:mine", "llama_factory", None),
        ("my.json:mine=0.5", "llama_factory", 0.5),
        ("a/dataset_info.json", "llama_factory", None),
        ("files:a/dataset_info.json", "files", None),
        ("files,prompt=q:a.json", "files,prompt=q", None),
        ("https://host/a.json", "files", None),
    ],
)
def test_which_paths_are_entries(data_path: str, source: str, weight: float | None) -> None:
    spec, _, got = parse_data_path(data_path)
    assert (spec, got) == (source, weight)


@pytest.mark.parametrize(
    "entry",
    [
        {"file_name": "../secret.jsonl"},
        {"file_name": "sub/../../secret.jsonl"},
        {"file_name": "ABSOLUTE"},
        {"file_name": "*/../../secret.jsonl"},
        {"hf_hub_url": "ABSOLUTE"},
        {"hf_hub_url": "../secret.jsonl"},
    ],
)
def test_an_entry_reads_nothing_outside_of_its_directory(tmp_path: Path, entry: dict[str, str]) -> None:
    """A stranger's dataset_info.json must not lead to a private file."""
    (tmp_path / "secret.jsonl").write_text(json.dumps({"instruction": "q", "output": "secret"}) + "\n")
    folder = tmp_path / "downloaded"
    (folder / "sub").mkdir(parents=True)
    [(key, name)] = entry.items()
    path = write(folder, {key: name.replace("ABSOLUTE", str(tmp_path / "secret.jsonl"))})
    with pytest.raises(UserError, match=rf":mine: {key} '.*': expected"):
        open_origin(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "sub", "sub/rows.jsonl", "outside/rows.jsonl", "outside", "s*/*.jsonl"])
def test_an_entry_follows_no_link_out_of_its_directory(tmp_path: Path, name: str) -> None:
    """A stranger's archive may have links: to a file, to a directory, and below a directory or a pattern."""
    secret = tmp_path / "secret" / "rows.jsonl"
    secret.parent.mkdir()
    secret.write_text(json.dumps({"instruction": "q", "output": "secret"}) + "\n")
    folder = tmp_path / "downloaded"
    (folder / "sub").mkdir(parents=True)
    path = write(folder, {"file_name": name})
    (folder / "rows.jsonl").unlink(missing_ok=True)
    for link in (folder / "rows.jsonl", folder / "sub" / "rows.jsonl"):
        link.symlink_to(secret)
    (folder / "outside").symlink_to(secret.parent)
    with pytest.raises(UserError, match=r":mine: file_name '.*': .*rows.jsonl leads out of the folder"):
        open_origin(path)


def test_an_entry_in_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    """There each file is a link to a blob outside of the snapshot."""
    for folder in ("snapshots/1", "blobs"):
        (tmp_path / folder).mkdir(parents=True)
    path = write(tmp_path / "snapshots" / "1", {"file_name": "rows.jsonl"})
    for name, text in (("dataset_info.json", ""), ("rows.jsonl", '{"instruction": "q", "output": "good"}')):
        file = tmp_path / "snapshots" / "1" / name
        blob = tmp_path / "blobs" / name[:4]
        blob.write_text(text or file.read_text())
        file.unlink(missing_ok=True)
        file.symlink_to(f"../../blobs/{name[:4]}")
    assert len(list(open_origin(path).rows("sft"))) == 1


def test_an_entry_may_name_a_file_below(tmp_path: Path) -> None:
    path = write(tmp_path, {"file_name": "sub/../sub/rows.jsonl"})
    (tmp_path / "sub").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"instruction": "q", "output": "good"}')
    (tmp_path / "rows.jsonl").rename(tmp_path / "sub" / "rows.jsonl")
    assert len(list(open_origin(path).rows("sft"))) == 1


def test_a_name_is_needed_and_the_existing_ones_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    with pytest.raises(UserError, match=r"no dataset 'mein'.*did you mean 'mine'.*have mine; write .*json:NAME"):
        open_origin(path[:-4] + "mein")
    with pytest.raises(UserError, match="got no name of a dataset; have mine"):
        open_origin(path.removesuffix(":mine"))
    with pytest.raises(UserError, match="cannot be read"):
        open_origin(str(tmp_path / "other" / "dataset_info.json:mine"))
