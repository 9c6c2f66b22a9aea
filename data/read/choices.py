"""Questions with choices and an answer, as MMLU, ARC and C-Eval have them, and as lm-evaluation-harness asks them."""

from collections.abc import Sequence
from dataclasses import dataclass

from data.read.paths import TableConfig, open_path
from data.read.records import Record, Skipped, column_names, read_text
from rlhf.errors import UserError
from rlhf.text.messages import short_json

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Question:
    """A text and its continuations, of which one is right."""

    text: str
    choices: tuple[str, ...]
    """each follows the text after a space"""
    answer: int
    """the number of the right choice"""


def read_questions(path: str) -> list[Question]:
    """The questions of a file, a directory, or a dataset on the hub (its split `test`).

    Raises: UserError if it cannot be read, has no rows, or for a row with other columns.
    """
    questions = []
    for location, record in open_path(path).records("test", TableConfig()):
        if isinstance(record, Skipped):
            raise UserError(record.reason)
        questions.append(_read(record, location))
    if not questions:
        raise UserError(f"{path}: has no questions, expected one or more")
    return questions


def _read(record: Record, location: str) -> Question:
    question = read_text(record, "question", location)
    choices, letters = record.get("choices"), [letter for letter in LETTERS if letter in record]
    if isinstance(choices, dict) and "answerKey" in record:  # ARC
        labels, texts = choices.get("label") or (), choices.get("text") or ()
        answer = _position(labels, record["answerKey"], f"{location}: answerKey")
        return Question(f"Question: {question}\nAnswer:", tuple(map(str, texts)), answer)
    if isinstance(choices, list | tuple) and choices:  # MMLU
        names, ending = LETTERS[: len(choices)], "Answer:"
    elif letters[:2] == ["A", "B"]:  # C-Eval
        names, ending, choices = "".join(letters), "答案\uff1a", [record[letter] for letter in letters]
    else:
        raise UserError(
            f"{location}: got columns {column_names(record)}, expected question, choices and answer; question, A, B "
            "... and answer; or question, choices and answerKey"
        )
    lines = "".join(f"{name}. {choice}\n" for name, choice in zip(names, choices, strict=True))
    label = record.get("answer")
    labels = [*range(len(choices))] if isinstance(label, int) else [*names]
    return Question(
        f"{question.strip()}\n{lines}{ending}", tuple(names), _position(labels, label, f"{location}: answer")
    )


def _position(labels: Sequence[object], label: object, location: str) -> int:
    if label not in labels:
        raise UserError(f"{location}: got {short_json(label)}, expected one of {', '.join(map(str, labels))}")
    return labels.index(label)
