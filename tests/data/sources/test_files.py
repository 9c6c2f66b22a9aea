"""The generic source: its options, and the real files that it must read without any."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data.read.paths import TableConfig
from data.read.records import Phase, Skipped
from data.read.shapes import SHAPES
from data.read.table import Labelled, Parsed
from data.sources.files import Config, parse
from rlhf.config import validate
from rlhf.errors import UserError
from rlhf.plugins import build
from rlhf.types import Message, Row

DATA = Path(__file__).parents[4] / "shared/data"
BAD = Skipped("labelled bad")
Q = (Message("user", "q"),)


def rows(path: Path, phase: Phase, options: str = "") -> list[Row | Skipped]:
    return list(build("data.sources", "files" + options, str(path)).rows(phase))


def parsed(record: dict[str, Any], **options: str) -> Parsed:
    return parse(record, "f:1", options.pop("shape", None), options)


def parse_error(record: dict[str, Any], **options: str) -> str:
    with pytest.raises(UserError) as error:
        parsed(record, **options)
    return str(error.value).removeprefix("f:1: ")


# --- columns by other names


def test_columns_are_mapped_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text("id,question,good,bad\n7,q,yes,no\n")
    result = rows(tmp_path / "my.csv", "reward", ",prompt=question,chosen=good,rejected=bad")
    assert result == [Row(Q, "yes", "no", "q", {"id": "7"})]


def test_a_mapped_column_replaces_its_namesake() -> None:
    record = {"prompt": "the rendered one", "ask": "q", "response": "x"}
    assert parsed(record, prompt="ask") == Row(Q, "x", None, "q")
    assert parsed({"prompt": "x", "response": "q"}, prompt="response", response="prompt") == Row(Q, "x", None, "q")


def test_a_mapping_decides_between_shapes() -> None:
    record = {"ask": "q", "messages": [{"role": "user", "content": "m"}], "reply": "x"}
    row = Row(Q, "x", None, "q", {"messages": record["messages"]})
    assert parsed(record, prompt="ask", response="reply") == row
    assert parsed(record) == Row((Message("user", "m"),), None, None, "m", {"ask": "q", "reply": "x"})
    assert parsed({"input": "q", "target": "x"}, prompt="input", response="target") == Row(Q, "x", None, "q")


def test_every_column_of_every_shape_can_be_mapped() -> None:
    fields = set(Config.model_fields) - set(TableConfig.model_fields) - {"shape"}
    assert fields == {column for shape in SHAPES for column in (*shape.columns, *shape.optional)}


def test_the_answer_can_be_left_to_a_reward_function() -> None:
    record = {"question": "q", "answer": "#### 4"}
    assert parsed(record, shape="prompt", prompt="question") == Row(Q, None, None, "q", {"answer": "#### 4"})


def test_mistakes_in_a_mapping() -> None:
    record = {"question": "q", "good": "x"}
    assert parse_error(record, prompt="qestion") == (
        "no column 'qestion' (prompt=qestion) (did you mean 'question'?); have question, good"
    )
    assert parse_error(record, prompt="question", chosen="good").startswith(
        "got the columns prompt, chosen; expected those of a shape of docs/data.md; map the columns: files,"
    )
    with pytest.raises(UserError, match=r"^data.sources.files: no option 'promt' \(did you mean 'prompt'\?\); have "):
        build("data.sources", "files,promt=x", "x.csv")


# --- the shape by name


def test_the_shape_is_named_where_two_fit() -> None:
    talk = [{"role": "user", "content": "m"}, {"role": "assistant", "content": "n"}]
    record = {"prompt": "q", "response": "x", "messages": talk}
    assert parse_error(record) == (
        "the columns fit the shapes prompt-response and messages; choose one, as in files,shape=prompt-response:PATH"
    )
    assert parsed(record, shape="prompt-response") == Row(Q, "x", None, "q", {"messages": talk})
    assert parsed(record, shape="messages") == Row(
        (Message("user", "m"),), "n", None, "m", {"prompt": "q", "response": "x"}
    )
    assert parse_error({"prompt": "q"}, shape="messages").startswith(
        "got the columns prompt; expected those of shape=messages: messages; map the columns"
    )


def test_a_label_that_is_none_is_left_alone() -> None:
    record = {"prompt": "q", "response": "x", "label": "physics"}
    assert 'label: got "physics", expected true or false' in parse_error(record)
    assert parsed(record, shape="prompt-response") == Row(Q, "x", None, "q", {"label": "physics"})
    assert isinstance(parsed(record | {"label": "TRUE"}), Labelled)


def test_a_shape_that_there_is_not() -> None:
    with pytest.raises(UserError) as error:
        validate(Config, {"shape": "promt-response"}, "data.sources.files")
    assert str(error.value).startswith(
        "data.sources.files: shape: no shape 'promt-response' (did you mean 'prompt-response'?); have prompt-chosen-"
    )


# --- places


def test_a_part_may_be_named_by_a_number() -> None:
    config = build("data.sources", "files,subset=0625,split=2024,prompt=1", "owner/name").config
    assert (config.subset, config.split) == ("0625", "2024")


# --- real files


REAL = {
    "llama-factory-demo/alpaca_en_demo.json.gz": 999,
    "llama-factory-demo/alpaca_zh_demo.json.gz": 1000,
    "llama-factory-demo/dpo_en_demo.json.gz": 300,
    "llama-factory-demo/dpo_zh_demo.json.gz": 300,
    "llama-factory-demo/identity.json.gz": 91,
    "llama-factory-demo/kto_en_demo.json.gz": 300,
    "oasst-zh/oaast_sft_zh.json.gz": 766,
    "oasst-zh/oaast_rm_zh.json.gz": 775,
    "gsm8k/train.jsonl.gz": 7473,
    "gsm8k/test.jsonl.gz": 1319,
    "dolly-sample/dolly_eval_200.json.gz": 200,
    "schema-fixtures/alpaca_instruction_zh.jsonl": 1,
    "schema-fixtures/colossalchat_preference.jsonl": 1,
    "schema-fixtures/colossalchat_prompt.jsonl": 1,
    "schema-fixtures/colossalchat_sft.jsonl": 1,
    "schema-fixtures/local__jsonfile.jsonl": 1,
    "schema-fixtures/trl-lib__Capybara.jsonl": 1,
    "schema-fixtures/trl-lib__hh-rlhf-helpful-base.jsonl": 2,
    "schema-fixtures/trl-lib__kto-mix-14k.jsonl": 1,
    "schema-fixtures/trl-lib__tldr-preference.jsonl": 1,
    "schema-fixtures/trl-lib__tldr.jsonl": 1,
    "schema-fixtures/trl-lib__ultrafeedback-prompt.jsonl": 1,
    "schema-fixtures/trl-lib__ultrafeedback_binarized.jsonl": 1,
}
PROMPTS_ONLY = ("colossalchat_prompt", "ultrafeedback-prompt")


def real(name: str) -> Path:
    if not DATA.is_dir():
        pytest.skip(f"no real data in {DATA}")
    return DATA / name


@pytest.mark.parametrize("name", REAL)
def test_real_files_load_without_options(name: str) -> None:
    for phase in ("sft", "ppo"):
        result = rows(real(name), phase)  # type: ignore[arg-type]
        assert len(result) == REAL[name]
        loaded = [row for row in result if isinstance(row, Row)]
        assert all(row == BAD for row in result if isinstance(row, Skipped))
        assert len(loaded) == len(result) or (phase == "sft" and "kto" in name)
        assert phase == "ppo" or any(only in name for only in PROMPTS_ONLY) or all(row.response for row in loaded)
        for row in loaded:
            assert [message.role for message in row.prompt][-1] == "user"
            assert row.group


def test_real_rankings_give_all_pairs() -> None:
    file = real("oasst-zh/oaast_rm_zh.json.gz")
    records = json.loads(gzip.decompress(file.read_bytes()))
    expected = [
        (record["output"][i], record["output"][j])
        for record in records
        for i in range(len(record["output"]))
        for j in range(i + 1, len(record["output"]))
    ]
    result = [row for row in rows(file, "reward") if isinstance(row, Row)]
    assert [(row.response, row.rejected) for row in result] == expected
    assert [row.response for row in rows(file, "sft") if isinstance(row, Row)] == [r["output"][0] for r in records]
    long = next(record for record in records if len(record["history"]) == 2)
    row = next(row for row in result if row.prompt[-1].content == long["instruction"])
    assert [message.content for message in row.prompt] == [
        *long["history"][0],
        *long["history"][1],
        long["instruction"],
    ]
