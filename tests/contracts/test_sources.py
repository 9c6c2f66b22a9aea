"""What every source of rows keeps to. A new file in data/sources gets its tests by a line in EXAMPLES,
and a dataset of texts alone by its row in the table."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.read.records import DataSource, Phase, Skipped
from data.sources.demo import words
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.plugins import build, find, names
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.types import Message, Row
from tests.contracts.source_examples import COUNT, EXAMPLES, FIXTURES, PHASES, place_of, variants, write_records

FOLDER = "data.sources"
ROOT = Path(__file__).parents[2]
DEMO_MODEL = str(ROOT / "configs/models/demo-llama.yaml")
FIXTURE_FOLDER = ROOT.parent / "shared/data/schema-fixtures"
WITH_RECORDS = sorted(key for key, example in EXAMPLES.items() if example.make)

QUESTION, GOOD, BAD = "Which way is up?", "Away from the ground.", "To the left of it."
ODD = "naïve 漢字 🙂 \u200f\u2028 \x00 \x07\x1b[0m <b>&amp;</b> </s> <|im_end|> {x} %s \\n {}"


@pytest.fixture(params=sorted(EXAMPLES))
def key(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WITH_RECORDS)
def table(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def name_of(key: str) -> str:
    return key.partition("/")[0]


def opened(key: str, path: str) -> Any:
    """A DataSource, which may have a fingerprint."""
    return build(FOLDER, name_of(key) + EXAMPLES[key].options, path)


def all_rows(source: DataSource) -> Iterator[tuple[Phase, Row]]:
    return ((phase, row) for phase in PHASES for row in source.rows(phase) if isinstance(row, Row))


def example_records(key: str, *texts: str) -> list[dict[str, Any]]:
    make = EXAMPLES[key].make
    assert make
    return make(*texts)


def read(key: str, folder: Path, records: list[dict[str, Any]]) -> dict[Phase, list[Row | Skipped]]:
    source = opened(key, write_records(folder / "x.jsonl", records))
    return {phase: list(source.rows(phase)) for phase in EXAMPLES[key].phases}


def texts_of(items: list[Row | Skipped]) -> set[str]:
    rows = [item for item in items if isinstance(item, Row)]
    prompt_texts = {message.content for row in rows for message in row.prompt}
    return prompt_texts | {text for row in rows for text in (row.response, row.rejected) if text is not None}


def test_every_source_has_an_example() -> None:
    assert sorted({name_of(key) for key in EXAMPLES}) == names(FOLDER), "add the new source to EXAMPLES"


def test_it_has_a_config_and_says_what_it_reads(key: str) -> None:
    module = find(FOLDER, name_of(key))
    assert issubclass(module.Config, Config)
    assert module.Config() == module.Config()
    assert module.__doc__


def test_a_hub_id_belongs_to_one_source() -> None:
    owned = {name: getattr(find(FOLDER, name), "HUB_IDS", ()) for name in names(FOLDER)}
    count = Counter(hub_id.casefold() for hub_ids in owned.values() for hub_id in hub_ids)
    assert count
    assert all(number == 1 and re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id) for hub_id, number in count.items())
    assert all(isinstance(hub_ids, tuple) for hub_ids in owned.values())


def test_schema(key: str, tmp_path: Path) -> None:
    counts = dict.fromkeys(PHASES, 0)
    for phase, row in all_rows(opened(key, place_of(EXAMPLES[key], tmp_path))):
        assert isinstance(row.prompt, tuple)
        for message in row.prompt:
            assert isinstance(message, Message)
            assert message.role in ("system", "user", "assistant")
            assert isinstance(message.content, str)
        assert not row.prompt or row.prompt[-1].role == "user"
        assert isinstance(row.group, str)
        assert isinstance(row.columns, dict)
        json.dumps(row.columns)
        assert row.response is None or isinstance(row.response, str)
        assert row.rejected is None or isinstance(row.response, str)
        usable = {"sft": row.response, "reward": row.rejected, "ppo": any(m.content for m in row.prompt)}
        counts[phase] += bool(usable[phase])
        assert phase != "reward" or row.response != row.rejected
    for phase in EXAMPLES[key].phases:
        assert counts[phase] >= COUNT


def expect(got: dict[Phase, list[Row | Skipped]], question: str, good: str, bad: str) -> None:
    """One row in each phase, whose texts are these to the letter."""
    for phase, items in got.items():
        assert len(items) == 1
        row = items[0]
        assert isinstance(row, Row), row
        assert row.prompt == (Message("user", question),)
        assert phase == "ppo" or row.response == good
        assert row.response in (None, good)
        assert phase != "reward" or row.rejected == bad
        assert row.rejected in (None, bad)


def test_the_texts_are_those_of_the_record(table: str, tmp_path: Path) -> None:
    expect(read(table, tmp_path, example_records(table, QUESTION, GOOD, BAD)), QUESTION, GOOD, BAD)


def test_odd_letters_and_long_texts_go_through(table: str, tmp_path: Path) -> None:
    long = "word " * 30_000  # more than the 128 KiB of a field of CSV
    for texts in ((f"q {ODD} q", f"g {ODD} g", f"b {ODD} b"), (long + "q", long + "g", long + "b")):
        expect(read(table, tmp_path, example_records(table, *texts)), *texts)


def test_rows_are_the_same_every_time(key: str, tmp_path: Path) -> None:
    path = place_of(EXAMPLES[key], tmp_path)
    source = opened(key, path)
    first = list(all_rows(source))
    assert list(all_rows(source)) == first
    assert list(all_rows(opened(key, path))) == first


def test_the_fingerprint_changes_with_the_records(key: str, tmp_path: Path) -> None:
    path = place_of(EXAMPLES[key], tmp_path)
    source, same = opened(key, path), opened(key, path)
    before = {phase: source.fingerprint(phase) for phase in PHASES}
    assert before == {phase: same.fingerprint(phase) for phase in PHASES}
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes().replace(b"5", b"6"))
    other = build(FOLDER, "demo,rows=201", "") if key == "demo" else opened(key, path)
    assert all(other.fingerprint(phase) != before[phase] for phase in PHASES)


def test_a_spoiled_column_is_told_by_line_and_name(table: str, tmp_path: Path) -> None:
    texts = (QUESTION, GOOD, BAD)
    sound = set.union(*(texts_of(items) for items in read(table, tmp_path, example_records(table, *texts)).values()))
    needed = [variant for variant in variants(EXAMPLES[table], *texts) if variant.needed]
    assert len(needed) >= 10
    for variant in needed:
        for phase, items in read(table, tmp_path, variant.records).items():
            context = f"{phase}: {variant.what}: {items}"
            assert texts_of(items) <= sound, context
            if variant.reason:
                assert Skipped(variant.reason) in items, context
                continue
            bad = [item.reason for item in items if isinstance(item, Skipped) and item.bad]
            assert len(bad) == 1, context
            assert bad[0].startswith(f"{tmp_path / 'x.jsonl'}:{variant.line}: "), bad
            assert variant.column in bad[0].removeprefix(str(tmp_path)), bad
            assert "\n" not in bad[0]
            assert len(bad[0]) < 400
            assert len(items) == 1 or len(variant.records) > 1, context


def test_a_column_that_nobody_needs_may_hold_anything(table: str, tmp_path: Path) -> None:
    for variant in variants(EXAMPLES[table], QUESTION, GOOD, BAD):
        if not variant.needed:
            items = [item for items in read(table, tmp_path, variant.records).values() for item in items]
            assert not [item for item in items if isinstance(item, Skipped) and item.bad], variant.what


def test_empty_and_marker_texts_are_rows_or_told(table: str, tmp_path: Path) -> None:
    for empty in ("", " ", "\n\nHuman:", "\n\nAssistant:", "USER:", "<", "<p>", "[1]", "<extra_id_1>"):
        for texts in ((empty, GOOD, BAD), (QUESTION, empty, BAD), (QUESTION, GOOD, empty), (empty, empty, empty)):
            for items in read(table, tmp_path, example_records(table, *texts)).values():
                assert items
                assert all(isinstance(item, Row | Skipped) for item in items)


def test_a_missing_place_is_told_without_waiting(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s to try again"))
    for path in ("absent/folder/x.jsonl", "./absent", "no-such-owner/no-such-name"):
        with pytest.raises(UserError) as error:
            list(opened(key, path).rows("sft"))
        assert path in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.skipif(not FIXTURE_FOLDER.is_dir(), reason="the schema fixtures are not here")
@pytest.mark.parametrize("fixture", sorted(FIXTURES))
def test_the_schema_fixtures_give_rows(fixture: str) -> None:
    spec, phases = FIXTURES[fixture]
    source = build(FOLDER, spec, str(FIXTURE_FOLDER / f"{fixture}.jsonl"))
    for phase in PHASES:
        items = list(source.rows(phase))
        assert not [item for item in items if isinstance(item, Skipped) and item.bad]
        rows = [item for item in items if isinstance(item, Row)]
        values: dict[Phase, list[Any]] = {
            "sft": [row.response for row in rows],
            "reward": [row.rejected for row in rows],
            "ppo": [row.prompt for row in rows],
        }
        assert any(values[phase]) == (phase in phases)


def test_the_demo_model_knows_every_word_of_the_demo() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    assert tokenizer.unk_token_id not in tokenizer.encode(" ".join(words()))
    known = set(words())
    for _, row in all_rows(build(FOLDER, "demo,rows=1000", "")):
        for text in (row.prompt[0].content, row.response or "", row.rejected or ""):
            assert known.issuperset(text.split())
            assert tokenizer.decode(tokenizer.encode(text)) == text
    for name in ("auto", "plain"):  # the words of the templates' frames too
        template = Template(prepare_tokenizer(tokenizer, name))
        ids = template.prompt_ids((Message("user", "tell me"),)) + template.response_ids("the fox")
        assert tokenizer.unk_token_id not in ids
