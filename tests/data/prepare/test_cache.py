"""Tokenised rows are made once, whole or not at all, and again whenever something they depend on changes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data import dataset
from data.config import DataOptions
from data.dataset import PhaseData, Recipe, open_datasets
from data.prepare import cache
from data.preview.command import PreviewConfig
from rlhf.errors import UserError
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from step1_sft.config import SFTConfig
from tests.support import forked

SFT = Recipe("sft")
WORDS = [f"w{i}" for i in range(300)]


def tokenizer(folder: Path, words: list[str] = WORDS, template: str = "plain") -> PreTrainedTokenizerBase:
    file = folder / f"{len(words)}.yaml"
    file.write_text(json.dumps({"tokenizer": {"words": words}}))
    return prepare_tokenizer(load_tokenizer(str(file)), template)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(range(100))
    return tmp_path


def write(numbers: range) -> None:
    Path("x.jsonl").write_text("".join(f'{{"prompt": "w{i}", "response": "w{i} w1"}}\n' for i in numbers))


def options(**more: Any) -> DataOptions:
    return DataOptions(data_path=("x.jsonl",), data_cache="cache", **{"data_split": (1, 0, 0), **more})


def sets() -> set[str]:
    return {path.name for path in Path("cache").iterdir() if path.is_dir()}


def contents(data: PhaseData) -> tuple[Any, ...]:
    return data.train[:], data.evaluation[:], data.report


def test_the_second_call_reads_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_datasets(options(), Recipe("sft"), tokenizer(home))
    before = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*") if path.suffix != ".lock"}
    monkeypatch.setattr(dataset, "build_dataset", None)  # it would not work again
    second = open_datasets(options(data_workers=3), Recipe("sft"), tokenizer(home))
    assert contents(first) == contents(second)
    assert before == {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*") if path.suffix != ".lock"}
    assert not list(Path("cache").glob(".tmp-*"))
    assert not list(Path("cache").rglob("rows.arrow"))


def test_whatever_matters_makes_another_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def make(data_options: DataOptions, recipe: Recipe = SFT, words: list[str] = WORDS, name: str = "plain") -> None:
        nonlocal count
        open_datasets(data_options, recipe, tokenizer(home, words, name))
        count += 1
        assert len(sets()) == count

    make(options())
    make(options(max_length=64))
    make(options(data_seed=1))
    make(options(data_split=(1, 0, 1)))
    make(options(max_train_rows=30))
    make(options(), Recipe("sft", loss_on="all"))
    make(options(data_split=(1, 0, 1)), Recipe("ppo"))
    make(options(), words=[WORDS[1], WORDS[0], *WORDS[2:]])
    make(options(), name="human_assistant")
    write(range(101))
    make(options())
    monkeypatch.setattr(cache, "code_digest", lambda: "another version")
    make(options())


def test_an_incomplete_entry_is_rebuilt(home: Path) -> None:
    first = contents(open_datasets(options(), Recipe("sft"), tokenizer(home)))
    [name] = sets()
    (Path("cache") / name / cache.REPORT).unlink()
    assert contents(open_datasets(options(), Recipe("sft"), tokenizer(home))) == first
    assert sets() == {name}


def test_a_failure_leaves_nothing(home: Path) -> None:
    Path("x.jsonl").write_text("{")
    with pytest.raises(UserError):
        open_datasets(options(), Recipe("sft"), tokenizer(home))
    assert not sets()


def test_old_leftovers_are_swept_and_nothing_else(home: Path) -> None:
    for name, age in ((".tmp-old", 90_000), (".tmp-new", 10), ("mine", 90_000)):
        (home / "cache" / name).mkdir(parents=True)
        os.utime(home / "cache" / name, (time.time() - age,) * 2)
    open_datasets(options(), Recipe("sft"), tokenizer(home))
    assert {".tmp-new", "mine"} < sets()
    assert ".tmp-old" not in sets()


def build_slowly(folder: str, queue: Any) -> None:
    with cache.build_entry(Path(folder)) as staging:
        if staging is not None:
            queue.put("built")
            time.sleep(0.3)
            (staging / "items").write_text("x")
            (staging / cache.REPORT).write_text("{}")
    queue.put("there" if cache.is_complete(Path(folder)) else "missing")


def test_several_processes_build_once(tmp_path: Path) -> None:
    context = forked.context()
    queue = context.Queue()
    workers = [context.Process(target=build_slowly, args=(str(tmp_path / "set"), queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    result = sorted(queue.get(timeout=60) for _ in range(4))
    for worker in workers:
        worker.join()
    assert result == ["built", "there", "there", "there"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "set.lock"]


def build_and_die(folder: str, queue: Any) -> None:
    """A tokeniser that is killed while a child of it goes on."""
    with cache.build_entry(Path(folder)) as staging:
        assert staging is not None
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        queue.put("building")
        time.sleep(30)


def test_a_killed_builder_blocks_nobody(tmp_path: Path) -> None:
    context = forked.context()
    queue = context.Queue()
    builder = context.Process(target=build_and_die, args=(str(tmp_path / "set"), queue))
    builder.start()
    assert queue.get(timeout=60) == "building"
    builder.kill()
    builder.join()
    with cache.build_entry(tmp_path / "set") as staging:  # a lock that is held for good would block for good
        assert staging is not None
        (staging / cache.REPORT).write_text("{}")


def test_what_makes_no_row_makes_no_set(home: Path) -> None:
    """Learning rate and output directory, and the preview of the same data, share one cache entry."""
    common: dict[str, Any] = {"data_path": ("x.jsonl",), "data_cache": "cache", "data_split": (1, 0, 0)}
    for config in (
        SFTConfig(**common),
        SFTConfig(learning_rate=1.0, output_dir="elsewhere", batch_size=2, seed=5, **common),
        PreviewConfig(rows=9, model="m", **common),
        DataOptions(max_dropped=0.9, **common),
        DataOptions(ppo_only_data_path=("y.jsonl",), **common),
    ):
        open_datasets(config, SFT, tokenizer(home))
        assert len(sets()) == 1


def test_a_cache_that_cannot_be_written(home: Path) -> None:
    Path("file").touch()
    with pytest.raises(UserError, match=r"file: cannot be written.*--data-cache"):
        open_datasets(DataOptions(data_path=("x.jsonl",), data_cache="file"), Recipe("sft"), tokenizer(home))


def test_ids_are_stored_as_small_as_they_can_be(home: Path) -> None:
    data = open_datasets(options(), Recipe("sft"), tokenizer(home))
    assert data.train.table is not None
    assert data.train.table.features["ids"].feature.dtype == "uint16"
    assert data.train.lengths.tolist() == [len(item.ids) for item in data.train]  # type: ignore[union-attr]


IN_A_FRESH_PROCESS = """
import data.prepare.store
from data.dataset import Recipe, open_datasets
from tests.data.prepare.test_cache import options, tokenizer
from pathlib import Path

data.prepare.store.PARALLEL_MIN_ROWS = 50
given = options(data_workers=2).model_copy(update={"data_cache": "other"})
open_datasets(given, Recipe("sft"), tokenizer(Path.cwd()))
"""


def test_more_processes_make_the_same(home: Path) -> None:
    """In a process of its own: one that has trained models may be too large to be forked."""
    write(range(250))
    first = contents(open_datasets(options(data_workers=1), SFT, tokenizer(home)))
    done = forked.python("-c", IN_A_FRESH_PROCESS, cwd=home)
    assert done.returncode == 0, done.stderr
    assert len(list(Path("other").rglob("items*.arrow"))) == 2
    other_options = options().model_copy(update={"data_cache": "other"})
    assert contents(open_datasets(other_options, SFT, tokenizer(home))) == first
    assert len([path for path in Path("other").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("name", ["items-000-00000.arrow", "evaluation.npy", "train.npy", "report.json"])
def test_a_changed_entry_is_not_read(home: Path, name: str) -> None:
    """One bit of an id, of an order, of a count."""
    write(range(60))
    open_datasets(options(), SFT, tokenizer(home))
    [file] = Path(str(options().data_cache)).rglob(name)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: damaged \(.*\); remove the directory .* tokenised again"):
        open_datasets(options(), SFT, tokenizer(home))
