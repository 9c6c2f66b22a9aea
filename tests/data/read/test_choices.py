"""Questions as MMLU, ARC and C-Eval have them, in the words of lm-evaluation-harness's tasks."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from data.read.choices import Question, read_questions
from rlhf.errors import UserError

MMLU = {"question": " Which? ", "subject": "x", "choices": ["one", "two", "three", "four"], "answer": 2}
ARC = {"id": "1", "question": "Which?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "2"}
CEVAL = {"id": 0, "question": "Which?", "A": "one", "B": "two", "C": 3, "D": "four", "answer": "D", "explanation": ""}
EXPECTED = {
    "mmlu": Question("Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:", ("A", "B", "C", "D"), 2),
    "arc": Question("Question: Which?\nAnswer:", ("one", "two"), 1),
    "ceval": Question("Which?\nA. one\nB. two\nC. 3\nD. four\n答案\uff1a", ("A", "B", "C", "D"), 3),
}


def written(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_three_forms_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", MMLU, ARC, CEVAL, MMLU | {"answer": "B"})
    assert read_questions(path)[:3] == [*EXPECTED.values()]
    assert read_questions(path)[3].answer == 1


@pytest.mark.parametrize(("record", "name"), [(MMLU, "mmlu"), (ARC, "arc")])
def test_files_of_the_hub_are_read(tmp_path: Path, record: dict[str, Any], name: str) -> None:
    datasets.Dataset.from_list([record]).to_parquet(str(tmp_path / "test-0.parquet"))
    assert read_questions(str(tmp_path)) == [EXPECTED[name]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (MMLU | {"answer": 4}, "x.jsonl:1: answer: got 4, expected one of 0, 1, 2, 3"),
        (CEVAL | {"answer": "E"}, 'x.jsonl:1: answer: got "E", expected one of A, B, C, D'),
        (ARC | {"answerKey": "A"}, 'x.jsonl:1: answerKey: got "A", expected one of 1, 2'),
        ({"question": "q", "answer": "a"}, "got columns question, answer, expected question, choices and answer"),
        ({"prompt": "q"}, "no column 'question'"),
    ],
)
def test_other_rows_are_refused(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_questions(written(tmp_path / "x.jsonl", record))
    assert message in str(error.value)
