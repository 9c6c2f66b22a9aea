"""Stack Exchange: voted answers worked by hand, in the columns of HuggingFaceH4/stack-exchange-preferences.

The last test has the datasets whose row is texts alone: which column is preferred."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.read.records import Phase
from data.sources import _parsers as parsers
from rlhf.plugins import build

QUESTION = "<p>How do I <b>sort</b>?</p>\n\n<ul>\n<li>a &lt; b</li>\n</ul>\n<pre class='x'><code>x = [1]\n</code></pre>"


def record(*votes: int) -> dict[str, Any]:
    answers = [
        {"answer_id": i, "author": "a", "author_id": i, "author_profile": "p", "pm_score": v, "selected": False,
         "text": f"<p>It has {v}, by <code>sorted(x)</code>.<br>Yes.</p>"}
        for i, v in enumerate(votes)
    ]  # fmt: skip
    return {"qid": 7, "question": QUESTION, "answers": answers, "date": "2012/05/01", "metadata": ["https://x.org"]}


def rows(folder: Path, phase: Phase, *records: dict[str, Any]) -> list[Any]:
    (folder / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return list(build("data.sources", "stack_exchange", str(folder / "x.jsonl")).rows(phase))


def test_the_best_voted_is_learned_and_pairs_have_unequal_votes(tmp_path: Path) -> None:
    [row] = rows(tmp_path, "sft", record(0, 4, 4, -1))
    assert row.prompt[0].content == "How do I sort?\n\n- a < b\n\n```\nx = [1]\n\n```"
    assert (row.response, row.columns) == ("It has 4, by `sorted(x)`.\n\nYes.", {"qid": 7})
    pairs = [(row.response[7], row.rejected[7:9]) for row in rows(tmp_path, "reward", record(0, 4, 4, -1))]
    assert pairs == [("4", "0,"), ("4", "-1"), ("4", "0,"), ("4", "-1"), ("0", "-1")]
    assert [row.reason for row in rows(tmp_path, "reward", record(), record(3), record(2, 2))] == [
        "no response", "only one response", "tie",
    ]  # fmt: skip


@pytest.mark.parametrize(("answers", "kept"), [(10, list(range(9, -1, -1))), (19, list(range(18, -1, -2)))])
def test_of_many_answers_ten_are_used(answers: int, kept: list[int]) -> None:
    ranked = parsers.stack_exchange(record(*range(answers)), "f:1")
    assert [vote for _, vote in ranked.responses] == kept
    [prompt] = ranked.prompt
    assert ranked.group == prompt.content


def test_the_columns_of_datasets_of_texts(tmp_path: Path) -> None:
    made = {
        "stack_exchange_paired": ({"qid": 7, "question": "q", "response_k": "bad", "response_j": "good"}, "bad"),
        "synthetic_instruct": ({"prompt": "q", "chosen": " good", "rejected": "bad "}, "bad"),
        "zhihu_kol": ({"INSTRUCTION": "q", "RESPONSE": "good", "SOURCE": "s", "METADATA": "{}"}, None),
        "qg_jaquad": ({"question": "q", "sentence": "good", "answer": "a", "paragraph": "good. More."}, None),
    }
    for name, (record, rejected) in made.items():
        (tmp_path / "x.jsonl").write_text(json.dumps(record))
        (row,) = build("data.sources", name, str(tmp_path / "x.jsonl")).rows("reward")
        assert (row.prompt[0].content, row.response, row.rejected) == ("q", "good", rejected)
