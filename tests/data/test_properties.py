"""Whatever is in a file, it is read to the end, and every record is a row or a reason; nothing else is ever raised."""

import contextlib
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data.read.formats import read_records
from data.read.records import Phase, Skipped, Unusable
from data.read.shapes import SHAPES
from data.sources.files import Config, build, parse
from rlhf.errors import UserError
from rlhf.types import Row

COLUMNS = sorted({column for shape in SHAPES for column in (*shape.columns, *shape.optional)})
MANY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# Every code point, halves of surrogate pairs and controls among them, and the words that mean something here.
WORDS = (
    "\n\nHuman:",
    "\n\nAssistant:",
    "Human: ",
    " Assistant:",
    "</s>",
    "<|im_end|>",
    "\u2028",
    "\x00",
    "\ud83d",
    '"',
)
TEXT = st.lists(st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(WORDS), max_size=4).map(
    "".join
)
SOUND = st.text(max_size=20)
NUMBER = st.integers() | st.floats() | st.sampled_from([10**400, -(2**63), 1e308])
ROLE = st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool", "", None, 3])
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": ROLE, "from": ROLE, "content": TEXT | st.none(), "value": TEXT, "weight": NUMBER}
)
TALK = st.lists(MESSAGE, max_size=6)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
VALUE = TEXT | TALK | MESSAGE | st.lists(TEXT, max_size=3) | st.lists(st.lists(TEXT, max_size=2), max_size=2) | ANYTHING
ONE_SHAPE = st.sampled_from(SHAPES).flatmap(
    lambda shape: st.fixed_dictionaries(
        dict.fromkeys(shape.columns, TEXT | TALK | VALUE),
        optional=dict.fromkeys((*shape.optional, "id"), VALUE),
    )
)
RECORD = ONE_SHAPE | st.dictionaries(st.sampled_from(COLUMNS) | TEXT, VALUE, max_size=6)


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    return folder / name


def rows(file: Path, phase: Phase) -> list[Row | Skipped]:
    return list(build(Config(), str(file)).rows(phase))


def check(records: list[Row | Skipped], count: int) -> None:
    """One row or reason for each record; and a row holds nothing but text that can be written."""
    assert len(records) == count
    for one in records:
        if isinstance(one, Skipped):
            assert one.reason
            assert "\n" not in one.reason
        else:
            texts = [one.group, one.response or "", one.rejected or "", *(message.content for message in one.prompt)]
            assert all(text.encode().decode() == text for text in texts)


def as_lines(values: list[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def as_array(values: list[Any]) -> bytes:
    return json.dumps(values, indent=1).encode()


@MANY
@given(record=RECORD)
def test_a_record_is_a_row_or_a_mistake(record: dict[str, Any]) -> None:
    with contextlib.suppress(Unusable):
        try:
            assert parse(record, "f:1") is not None
        except UserError as error:
            assert str(error).startswith("f:1: ")
            assert "\n" not in str(error)


@MANY
@given(records=st.lists(RECORD | ANYTHING, max_size=8), name=st.sampled_from(["x.jsonl", "x.ndjson.gz", "x.json"]))
@example(records=[{"prompt": "x" * 1_000_000, "response": "\x00" * 1_000_000}], name="x.jsonl")
@example(records=[{"messages": [{"role": r, "content": "x"} for r in ("user", "assistant")] * 5000}], name="x.json")
def test_no_record_of_a_json_file_is_lost(tmp_path: Path, records: list[Any], name: str) -> None:
    content: Callable[[list[Any]], bytes] = as_array if name == "x.json" else as_lines
    if records and isinstance(records[0], list) and name != "x.json":
        records = [{}, *records]  # a file that begins with an array is refused
    file = write(tmp_path, name, content(records))
    for phase in ("sft", "ppo"):
        check(rows(file, phase), len(records))  # type: ignore[arg-type]
    assert all(isinstance(row, Row | Skipped) for row in rows(file, "reward"))


PIECES = st.sampled_from(
    [b"[", b"]", b"{", b"}", b'"', b",", b":", b"\n", b"\r", b"\\", b"\xff", b"NaN", b"\t", b"\x00"]
)
SPLICE = st.tuples(st.integers(0, 400), st.integers(0, 5), st.lists(PIECES, max_size=3).map(b"".join))


def damaged(content: bytes, splices: list[tuple[int, int, bytes]]) -> bytes:
    for start, length, piece in splices:
        content = content[:start] + piece + content[start + length :]
    return content


@MANY
@given(
    records=st.lists(RECORD, min_size=1, max_size=4),
    splices=st.lists(SPLICE, max_size=3),
    name=st.sampled_from(["x.jsonl", "x.json", "x.csv", "x.tsv", "x.txt", "x.jsonl.gz", "x.parquet"]),
)
def test_a_damaged_file_is_read_or_refused(
    tmp_path: Path, records: list[Any], splices: list[tuple[int, int, bytes]], name: str
) -> None:
    if name == "x.parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"prompt": [str(i) for i in range(len(records))]}), sink)
        content = sink.getvalue()
    else:
        content = as_array(records) if name == "x.json" else as_lines(records)
    content = damaged(content, splices)
    file = write(tmp_path, name, content)
    if name == "x.jsonl.gz":
        file.write_bytes(damaged(file.read_bytes(), splices))
    try:
        read = [one for _, one in read_records(file)]
    except UserError as error:
        assert str(error).startswith(str(file))
        assert "\n" not in str(error)
        return
    if name == "x.jsonl":
        assert len(read) == sum(not line.isspace() for line in io.BytesIO(content))
    check([one for one in read if isinstance(one, Skipped)], sum(isinstance(one, Skipped) for one in read))
