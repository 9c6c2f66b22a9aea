"""docs/data.md: its files are what it says they are, and its commands do what they are printed for."""

import csv
import importlib
import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from data.prepare.mixture import FOLDER, open_origin
from data.prepare.pack import CROSS_TEXT_ATTENTION
from data.preview import command as preview
from data.read.shapes import FORMATS
from rlhf import errors, plugins
from rlhf.chain import command as train
from rlhf.types import Row
from tests.support import programs
from tests.support.texts import byte_tokenizer

ROOT = Path(train.__file__).parents[2]
PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
DATASETS = (ROOT / "docs/datasets.md").read_text(encoding="utf-8")
COPIES = 150


def files() -> dict[str, str]:
    """The files of the page by name; each is shown in a block after its name."""
    return dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def numbered(value: Any, number: int) -> Any:
    """The same value about something else: `number` after what people say in it."""
    if isinstance(value, dict):
        return {key: item if key in ("role", "from") else numbered(item, number) for key, item in value.items()}
    if isinstance(value, list):
        return [numbered(item, number) for item in value]
    return f"{value} ({number})" if isinstance(value, str) and value and not value.isdecimal() else value


def enlarged(name: str, text: str) -> str:
    """Some hundred rows like those of a file on the page, which shows two."""
    numbers = range(COPIES)
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in text.splitlines()]
        return "".join(json.dumps(numbered(row, i)) + "\n" for i in numbers for row in rows)
    if name.endswith(".json") and text.startswith("["):
        return json.dumps([numbered(row, i) for i in numbers for row in json.loads(text)])
    if name.endswith(".csv"):
        table = list(csv.DictReader(io.StringIO(text)))
        out = io.StringIO()
        writer = csv.DictWriter(out, table[0])
        writer.writeheader()
        writer.writerows(numbered(row, i) for i in numbers for row in table)
        return out.getvalue()
    if name.endswith(".txt"):
        return "\n\n".join(f"{paragraph} {i}" for i in numbers for paragraph in text.split("\n\n"))
    return text


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in files().items():
        (tmp_path / name).write_text(enlarged(name, text), encoding="utf-8")
    byte_tokenizer().save_pretrained(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PREVIEWS = [line for line in commands() if "data.preview" in line]


@pytest.mark.parametrize("command", PREVIEWS)
def test_a_preview(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command)[2:])
    assert errors.run_as_user(preview.main) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    named = re.search(r"--phases ((?:sft|reward|ppo| )+)", command)
    for phase in named[1].split() if named else ["sft"]:
        assert re.search(rf"\b{phase}\b", captured.out), captured.err


SHOWN = re.findall(r"```bash\n(python -m data.preview [^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_a_preview_as_printed(
    command: str, shown: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files().items():
        (home / name).write_text(text, encoding="utf-8")  # the two rows of the page alone
    monkeypatch.setattr(sys, "argv", [*shlex.split(command)[2:], "--eval-fraction", "0", "--data-split", "1", "0", "0"])
    assert errors.run_as_user(preview.main) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    for line in filter(None, shown.splitlines()):
        assert f"\n{line}\n" in printed


@pytest.mark.parametrize("command", [line for line in commands() if "data.preview" not in line])
def test_a_training(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    stage = importlib.import_module(f"{words[2]}.__main__")
    code, printed, reported = programs.runner(words[2], stage.process, monkeypatch, capsys)(*words[3:])
    assert code == 0, reported
    assert (CROSS_TEXT_ATTENTION in printed) == ("--objective text" in command)
    out = home / words[words.index("--output-dir") + 1] / words[2]
    account = json.loads((out / "data.json").read_text())
    assert all(sum(source["outcomes"].values()) == source["rows"] > 0 for source in account["sources"])


def test_rows_of_every_file_of_the_page_are_all_used(home: Path) -> None:
    entries = {"questions.json": "dataset_info.json:questions", "talks.jsonl": "dataset_info.json:talks"}
    for name, text in files().items():
        if name.endswith((".jsonl", ".json", ".txt")) and name != "dataset_info.json":
            shown = len(text.splitlines()) if name.endswith(".jsonl") else 2
            rows = [*open_origin(entries.get(name, name)).rows("reward")]
            assert len(rows) == COPIES * shown and all(isinstance(row, Row) for row in rows), name


def test_the_table_of_shapes_is_that_of_the_reader() -> None:
    rows = [
        (shape.columns, shape.meaning, f"`{json.dumps(shape.example)}`".replace("|", "\\|"), shape.source)
        for shape in FORMATS
    ]
    table = [("columns", "what it is", "a row", "known from"), *rows]
    head, *lines = (f"| {' | '.join(cells)} |" for cells in table)
    assert "\n".join([head, "|---|---|---|---|", *lines]) in PAGE


def test_the_table_of_datasets_is_whole() -> None:
    listed = set(re.findall(r"^\| [^|]* \| `(\w+)`", DATASETS, re.MULTILINE))
    sources = set(plugins.names(FOLDER))
    assert listed - {"files"} <= sources
    missing = sources - listed - {"demo", "files", "llama_factory"}
    assert not missing, f"add a row to docs/datasets.md: {', '.join(missing)}"
    for name in sources:
        for hub_id in getattr(plugins.find(FOLDER, name), "HUB_IDS", ()):
            assert hub_id.split("/")[1] in DATASETS, f"{hub_id} ({name}) is not in docs/datasets.md"
