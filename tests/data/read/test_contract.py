"""A source of the user's own is held to what a source must give; a mistake names it, the row and what is wrong."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.dataset import PhaseData, Recipe, open_datasets
from data.prepare.split import PHASES
from rlhf.errors import UserError
from rlhf.text.tokenizer import prepare_tokenizer
from tests.support.texts import words_tokenizer

MINE = """
import datetime, decimal
from data.read.records import Skipped
from rlhf.config import Config
from rlhf.types import Message, Row
class Mine:
    def rows(self, phase):
        for i in range(3):
            yield Row((Message("user", f"w{i}"),), "w3", "w4")
        EXPRESSION
FINGERPRINT
def build(config, path): return Mine()
"""
FINGERPRINTS = ("", "    def fingerprint(self, phase): return None", "    def fingerprint(self, phase): return 'one'")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("words")
    return prepare_tokenizer(words_tokenizer(folder, *(f"w{i}" for i in range(9))), "plain")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def opened(tokenizer: PreTrainedTokenizerBase, phase: Any) -> PhaseData:
    shares = tuple(float(name == phase) for name in PHASES)
    options = DataOptions(data_path=("mine.py",), data_split=shares, eval_fraction=0.0, data_cache="cache")
    return open_datasets(options, Recipe(phase), tokenizer)


def write(expression: str, fingerprint: str = "") -> None:
    code = MINE.replace("EXPRESSION", expression).replace("FINGERPRINT", fingerprint)
    Path("mine.py").write_text(code, encoding="utf-8")


ASK = 'Row((Message("user", "w5"),), "w6", "w7"'
ROLES = "expected system, user, assistant, tool"
HALF = "got half a surrogate pair at character"
BROKEN = (
    ('yield {"prompt": "x"}', 'got {"prompt": "x"}, expected rlhf.types.Row'),
    ("yield self", "got a value of type Mine, expected rlhf.types.Row"),
    ('yield Row("x", "w6")', 'prompt: got "x", expected a tuple of messages'),
    ('yield Row(({"role": "user"},))', 'prompt[0]: got {"role": "user"}, expected rlhf.types.Message'),
    ('yield Row((Message("user", None),))', "prompt[0].content: got null, expected text"),
    ('yield Row((Message("user", "x"), Message("cook", "y")))', f'prompt[1]: got the role "cook", {ROLES}'),
    ("yield Row((), 5)", "response: got 5, expected text"),
    ('yield Row((), "x", ["y"])', 'rejected: got ["y"], expected text'),
    ('yield Row((), "é\\ud800")', f"response: {HALF} 1, expected text"),
    (f"yield {ASK}, group=7)", "group: got 7, expected text"),
    (f'yield {ASK}, columns={{"margin": float("nan")}})', "columns: margin: got NaN, expected a number"),
    ("yield Skipped(3)", "reason: got 3, expected text"),
)  # fmt: skip


@pytest.mark.parametrize(("expression", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_a_value_that_is_not_a_row_is_refused(
    expression: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    write(expression)
    with pytest.raises(UserError) as error:
        opened(tokenizer, "sft")
    assert str(error.value) == f"mine.py: row 4 of rows('sft'): {message}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("rows = lambda self, phase: 5", "rows('sft') failed after 0 rows: TypeError: 'int' object is not iterable"),
        ("rows = []", "build returned a value of type Mine, which has no function rows; expected rows(phase)"),
    ],
)
def test_an_object_that_is_not_a_source_is_refused(body: str, message: str, tokenizer: PreTrainedTokenizerBase) -> None:
    Path("mine.py").write_text(
        f"from rlhf.config import Config\nclass Mine:\n    {body}\ndef build(config, path): return Mine()\n"
    )
    with pytest.raises(UserError) as error:
        opened(tokenizer, "sft")
    assert str(error.value) == f"mine.py: {message}"


@pytest.mark.parametrize("fingerprint", FINGERPRINTS, ids=["none", "nothing said", "message"])
@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_an_error_inside_a_source_is_said_with_its_line(
    expression: str, words: str, fingerprint: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    write(expression, fingerprint)
    with pytest.raises(UserError) as error:
        opened(tokenizer, "sft")
    path = Path("mine.py").resolve()
    line = 1 + path.read_text().splitlines().index(next(x for x in path.read_text().splitlines() if expression in x))
    assert str(error.value) == f"mine.py: rows('sft') failed after 3 rows: {path}:{line}: in rows: {words}"


def test_a_user_error_of_a_source_is_passed_on(tokenizer: PreTrainedTokenizerBase) -> None:
    write("from rlhf.errors import UserError; raise UserError('the archive is locked; unlock it')")
    with pytest.raises(UserError, match=r"^the archive is locked; unlock it$") as error:
        opened(tokenizer, "sft")
    assert not hasattr(error.value, "__notes__")


def test_what_a_source_may_yield(tokenizer: PreTrainedTokenizerBase) -> None:
    """A list for a tuple, rows skipped, and columns of all sorts, which reward functions get as JSON has them."""
    columns = (
        '{"day": datetime.date(2024, 1, 2), "price": decimal.Decimal("1.50"), "x": b"x", "y": [{"a": (1, None)}], '
    )
    columns += '"took": datetime.timedelta(seconds=90)}'
    write(f'yield Row([Message("user", "w5")], "w6", columns={columns}); yield Skipped("tie"); yield Row((), "w7")')
    data = opened(tokenizer, "ppo")
    [source] = data.report["sources"]
    assert source["outcomes"] == {"train": 4, "tie": 1, "empty prompt": 1}
    result = [item.row.columns for item in data.train if item.row.columns]  # type: ignore[union-attr]
    assert result == [{"day": "2024-01-02", "price": "1.50", "x": None, "y": [{"a": [1, None]}], "took": "0:01:30"}]


def test_a_column_that_json_cannot_hold_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    write(f'yield {ASK}, columns={{"a": [0, {{1}}]}})')
    message = "mine.py: row 4: columns a: got a set; expected text, numbers, lists and mappings"
    with pytest.raises(UserError, match=message):
        opened(tokenizer, "ppo")


def test_what_a_source_says_of_its_rows_decides_whether_they_are_read_again(tokenizer: PreTrainedTokenizerBase) -> None:
    for fingerprint, expected in zip(FINGERPRINTS, ([4, 5], [4, 5], [4, 4]), strict=True):
        write("for word in open('words.txt'): yield Row((Message('user', word),), 'w6', 'w7')", fingerprint)
        result = []
        for words in ("w5\n", "w5\nw6\n"):
            Path("words.txt").write_text(words)
            result.append(opened(tokenizer, "sft").report["sources"][0]["rows"])
        assert result == expected


def test_another_code_is_another_source(tokenizer: PreTrainedTokenizerBase) -> None:
    for count, expression in ((3, "pass"), (4, f"yield {ASK})")):
        write(expression, FINGERPRINTS[-1])
        assert opened(tokenizer, "sft").report["sources"][0]["rows"] == count
