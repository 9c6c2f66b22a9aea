"""What a user's function gets of the data beside prompts and responses: the columns, and the reference response."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.prepare.gather import row_from_json, row_to_json
from data.sources import files
from rlhf import rewards
from rlhf.config.options import FrozenOptions
from rlhf.errors import UserError
from rlhf.rewards import learned
from rlhf.types import Row, Samples
from tests.rlhf.rewards.responses import context, rollout, samples
from tests.support import tiny


def with_rows(responses: list[str | None], columns: list[dict[str, Any]] | None = None) -> Samples:
    r = rollout()
    rows = zip(r.rows, responses, columns or [{}] * 3, strict=True)
    changed = tuple(replace(row, response=text, columns=column) for row, text, column in rows)
    return samples(replace(r, rows=changed))


def scores(folder: Path, text: str, s: Samples) -> list[float]:
    (folder / "mine.py").write_text(text)
    result: list[float] = rewards.open_source(f"{folder}/mine.py", context(folder))(s).tolist()
    return result


def test_the_response_of_the_data_is_the_column_reference(tmp_path: Path) -> None:
    s = with_rows(["a", "bb", "ccc"])
    assert scores(tmp_path, "def score(p, r, reference): return map(len, reference)", s) == [1, 2, 3]
    assert scores(tmp_path, "def score(p, r, **columns): return map(len, columns['reference'])", s) == [1, 2, 3]
    assert scores(tmp_path, "def score(p, r): return [0, 0, 0]", s) == [0, 0, 0]


def test_a_frozen_reward_model_has_the_bits_of_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of --reward-models.quantize, whole or sharded as its other options say."""
    asked: list[Any] = []
    monkeypatch.setattr(learned, "load_scalar_model", lambda *given: asked.append(given[3]) or pytest.fail("loaded"))
    tiny.tokenizer().save_pretrained(tmp_path)
    for kind in ("none", "nf4"):
        options = FrozenOptions(quantize=kind)
        opened = replace(context(tmp_path), model_options=options)
        with pytest.raises(pytest.fail.Exception):
            learned.build(learned.Config(model=str(tmp_path)), opened)
    assert [loading.quantize for loading in asked] == ["none", "nf4"]


def test_a_row_without_one_has_none(tmp_path: Path) -> None:
    text = "def score(p, r, reference): return [-1 if text is None else len(text) for text in reference]"
    assert scores(tmp_path, text, with_rows(["a", None, ""])) == [1, -1, 0]


def test_a_column_of_that_name_is_what_the_data_says(tmp_path: Path) -> None:
    s = with_rows(["a", "b", "c"], [{"reference": 7}, {"reference": 8}, {}])
    assert scores(tmp_path, "def score(p, r, reference): return [n or 0 for n in reference]", s) == [7, 8, 0]


def test_without_any_there_is_no_such_column(tmp_path: Path) -> None:
    s = with_rows([None] * 3)
    assert scores(tmp_path, "def score(p, r, reference=None): return [reference is None] * 3", s) == [1, 1, 1]
    assert scores(tmp_path, "def score(p, r, **columns): return [len(columns)] * 3", s) == [0, 0, 0]


@pytest.mark.parametrize(
    ("signature", "columns", "message"),
    [
        ("p, r, reference", {}, "takes 'reference', but the rows have none; if only some rows have it"),
        ("p, r, golden", {"gold": 1, "id": 2}, "takes 'golden', but the rows have gold, id"),
    ],
)
def test_what_no_row_has_is_asked_for_by_name(
    signature: str, columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        scores(tmp_path, f"def score({signature}): return [0] * 3", with_rows([None] * 3, [columns] * 3))
    assert message in str(caught.value) and "mine.py" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("signature", ["*texts", "p, /, r, gold=0", "p, r, *rest, gold=0"])
def test_signatures_of_all_kinds(signature: str, tmp_path: Path) -> None:
    assert scores(tmp_path, f"def score({signature}): return [1, 2, 3]", with_rows([None] * 3)) == [1, 2, 3]


def test_it_has_its_name_in_the_file_too(tmp_path: Path) -> None:
    """The row is read from a file as GSM8K's are, written and read again as for a rollout."""
    (tmp_path / "x.jsonl").write_text('{"question": "2 + 2?", "answer": 4}\n')
    [row] = files.build(files.Config(), str(tmp_path / "x.jsonl")).rows("ppo")
    assert isinstance(row, Row)
    stored = row_from_json(row_to_json(row, "ppo"))
    s = samples(replace(rollout(), rows=(stored,) * 3))
    assert scores(tmp_path, "def score(p, r, answer): return [float(a) for a in answer]", s) == [4, 4, 4]
    text = "def score(p, r, **columns): return [columns['answer'] == columns['reference'] == ['4'] * 3] * 3"
    assert scores(tmp_path, text, s) == [1, 1, 1]


def test_parameters_are_compared_with_the_columns_before_anything_is_sampled(tmp_path: Path) -> None:
    rows = with_rows(["a", "b", "c"], [{"gold": 7}] * 3).rollout.rows
    for text, error in (
        ("def score(p, r, gold, answers, other=1): ...", ""),
        ("def score(p, r, answer): ...", r"it takes 'answer', but the rows have gold, reference; .*answer=None"),
        ("def score(p): ...", r"expected function\(prompts, responses"),
    ):
        (tmp_path / f"{len(error)}.py").write_text(text)
        with pytest.raises(UserError, match=error) if error else nullcontext():
            rewards.check_rows(f"{tmp_path}/{len(error)}.py", rows)
