"""Rows as datasets and tools publish them: read without a word, or with what the error says to write, word for word.

Every record asks q; `good` is its preferred response, `bad` the other one. The columns are those of the dataset's card
or of the tool's documentation.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from data.read.records import Phase
from data.read.shapes import FORMATS, Format, match_shape
from data.read.table import Labelled, Ranked, Unanswered
from data.sources.files import KNOWN, parse
from rlhf.errors import UserError
from rlhf.plugins import build
from rlhf.types import Row
from tests.contracts.source_examples import EXAMPLES

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), *(("assistant", t) for t in ("good", "bad")))
)
SIDES = {"chosen": "good", "rejected": "bad"}
TALKS = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
TURNS = {"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}, {"from": "gpt", "value": "bad"}
LISTS: dict[str, Any] = {"generation_model": ["a", "b"], "labelling_prompt": [], "rationale": ["x", "y"]}


def parts(message: dict[str, str]) -> dict[str, Any]:
    """The message as arena-140k has it."""
    text = {"type": "text", "text": message["content"], "image": None, "mimeType": None}
    return {"role": message["role"], "content": [text]}


PAIRS: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [GOOD],
        "non_preferred_output": [BAD],
    },
    "NeMo RL, ranked": {
        "context": [USER],
        "task_name": "t",
        "completions": [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}],
    },
    "NeMo RL, HelpSteer3": {"context": [USER], **SIDES},
    "lmarena-ai/arena-human-preference-140k": {
        "id": "1",
        "model_a": "m",
        "winner": "model_b",
        "conversation_a": [parts(USER), parts(BAD)],
        "conversation_b": [parts(USER), parts(GOOD)],
        "full_conversation": [],
        "is_code": False,
    },
    "distilabel": {"instruction": "q", "generations": ["bad", "?", "good"], "ratings": [1, None, 5], "model_name": "m"},
    "distilabel before 1.0": {"input": "q", **LISTS, "generations": ["bad", "good"], "rating": [5.0, 9.0]},
    "argilla/distilabel-intel-orca-dpo-pairs": {
        "system": "",
        "input": "q",
        **SIDES,
        "generations": ["good", "bad"],
        "rating": [9.0, 7.0],
        "status": "unchanged",
    },
    "argilla/ultrafeedback-binarized-preferences": {
        "source": "s",
        "instruction": "q",
        "chosen_response": "good",
        "rejected_response": "bad",
        "chosen_avg_rating": 4.5,
    },
    "argilla/ultrafeedback-binarized-preferences-cleaned": {"prompt": "q", **TALKS, "chosen-rating": 5.0},
    "argilla/distilabel-capybara-dpo-7k-binarized": {
        "conversation": [{"input": "q", "output": "good"}],
        "new_generations": ["bad"],
        "prompt": "q",
        **TALKS,
        "rating_chosen": 5,
    },
    "Argilla": {"prompt": "q", "responses": ["bad", "good", "?"], "ratings": [2, 3, None]},
    "openbmb/UltraFeedback": {
        "instruction": "q",
        "models": ["a", "b"],
        "completions": [
            {"model": "a", "response": "bad", "fine-grained_score": 2.5, "overall_score": 5.0},
            {"model": "b", "response": "good", "fine-grained_score": 4.75, "overall_score": 8.5},
        ],
        "correct_answers": ["None"],
    },
    "Intel/orca_dpo_pairs": {"system": "", "question": "q", **SIDES},
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": {"id": "i", "prompt": "q", **TALKS, "source": "s"},
    "Skywork/Skywork-Reward-Preference-80K-v0.2": {**TALKS, "source": "s"},
    "RLHFlow": {**TALKS, "chosen_score": 2.0, "rejected_score": 1.0},
    "LLaMA-Factory, sharegpt": {"conversations": [TURNS[0]], "chosen": TURNS[1], "rejected": TURNS[2]},
    "LLaMA-Factory, alpaca": {"instruction": "q", "input": "", **SIDES},
    "Axolotl, argilla": {"system": "", "instruction": "q", "chosen_response": "good", "rejected_response": "bad"},
    "Axolotl, icr": {"system": "", "input": "q", **SIDES},
    "Axolotl, chat_template": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "ms-swift": {"query": "q", "response": "good", "rejected_response": "bad"},
    "ms-swift, a dialogue": {"messages": [USER, GOOD], "rejected_response": "bad"},
    "ms-swift, two dialogues": {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
    "two lists": {"input": "q", "responses": ["good", "bad"], "generations": ["good", "bad"]},
    "any name of the prompt": {"frage": "q", **SIDES, "subset": "x", "number": 3},
    **{
        f"{name}, a copy": make("q", "good", "bad")[0]
        for name in KNOWN
        if (make := EXAMPLES[name].make) and EXAMPLES[name].phases[1] == "reward" and len(make("q", "g", "b")) == 1
    },
}
GOOD_AND_BAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TRL": ({"prompt": "q", "completion": "good", "label": True}, {"prompt": "q", "completion": "bad", "label": False}),
    "TRL, messages": (
        {"prompt": [USER], "completion": [GOOD], "label": True},
        {"prompt": [USER], "completion": [BAD], "label": False},
    ),
    "LLaMA-Factory, sharegpt": (
        {"conversations": [TURNS[0], TURNS[1]], "kto_tag": True},
        {"conversations": [TURNS[0], TURNS[2]], "kto_tag": False},
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": "q", "input": "", "output": "good", "kto_tag": True},
        {"instruction": "q", "input": "", "output": "bad", "kto_tag": False},
    ),
    "Axolotl": (
        {"system": "", "instruction": "q", "completion": "good", "label": True},
        {"system": "", "instruction": "q", "completion": "bad", "label": False},
    ),
}


def rows(folder: Path, phase: Phase, *records: dict[str, Any]) -> list[Any]:
    """The rows of a file, read as it is, or else as the error says."""
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = list(build("data.sources", "files", str(path)).rows(phase))
    if isinstance(result[0], Row):
        return result
    match = re.search(r"(?:write|column of the prompt:) ([\w,=-]+):PATH", result[0].reason)
    assert match, result[0].reason
    return list(build("data.sources", match[1], str(path)).rows(phase))


def texts(row: Row) -> tuple[str, str | None, str | None]:
    assert isinstance(row, Row), row
    return row.prompt[-1].content, row.response, row.rejected


@pytest.mark.parametrize("name", PAIRS)
def test_a_published_pair(name: str, tmp_path: Path) -> None:
    assert [texts(row) for row in rows(tmp_path, "reward", PAIRS[name])] == [("q", "good", "bad")]


@pytest.mark.parametrize("name", GOOD_AND_BAD)
def test_labelled_responses(name: str, tmp_path: Path) -> None:
    assert [texts(row) for row in rows(tmp_path, "reward", *GOOD_AND_BAD[name])] == [("q", "good", "bad")]
    learned = [row for row in rows(tmp_path, "sft", *GOOD_AND_BAD[name]) if isinstance(row, Row)]
    assert [texts(row) for row in learned] == [("q", "good", None)]


def test_a_file_of_verl_has_prompts_and_what_its_reward_reads(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    truth = {"reward_model": {"ground_truth": "4", "style": "rule"}, "data_source": "openai/gsm8k"}
    record = {"prompt": [USER], "ability": "math", **truth, "extra_info": {"index": 0, "split": "train"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "x.parquet")
    (row,) = build("data.sources", "files", str(tmp_path / "x.parquet")).rows("ppo")
    assert texts(row) == ("q", None, None)
    assert row.columns == {name: value for name, value in record.items() if name != "prompt"}


@pytest.mark.parametrize("format", FORMATS, ids=[format.columns for format in FORMATS])
def test_the_example_of_a_format_is_one(format: Format) -> None:
    match = match_shape(tuple(format.example), None, frozenset())
    assert not isinstance(match, str) and match[0].format is format
    parsed = parse(format.example, "f:1")
    if isinstance(parsed, Ranked):
        assert max(parsed.responses, key=lambda response: response[1])[0] == "So."
        assert len(parsed.responses) == 2
        return
    assert isinstance(parsed, Labelled) == format.columns.endswith("label") and not isinstance(parsed, Unanswered)
    assert isinstance(parsed, Labelled) or (parsed.rejected == "No.") == (format.responses == 2)


def test_no_column_is_mapped_that_has_its_name() -> None:
    with pytest.raises(
        UserError, match="; write files,label=kto_tag:PATH, or to read them as they are files,shape=ins"
    ):
        parse(GOOD_AND_BAD["LLaMA-Factory, alpaca"][0], "f:1")


def test_an_input_stays_with_its_instruction(tmp_path: Path) -> None:
    record = {"instruction": "do", "input": "this", "completion": "good", "label": "true"}
    assert [texts(row) for row in rows(tmp_path, "sft", record)] == [("do\nthis", "good", None)]


def test_what_says_less_than_the_file_can_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(PAIRS["safe_rlhf, a copy"]))
    (error,) = build("data.sources", "files", str(tmp_path / "x.jsonl")).rows("ppo")
    assert error.reason.endswith("; write safe_rlhf:PATH, or to read them as they are files,shape=prompt:PATH")
    (row,) = build("data.sources", "files,shape=prompt", str(tmp_path / "x.jsonl")).rows("ppo")
    assert texts(row) == ("q", None, None)


def test_a_pair_made_of_a_published_dataset_is_a_pair() -> None:
    row = parse({"qid": 1, "question": "q", "answers": [], **SIDES}, "f:1")
    assert isinstance(row, Row) and texts(row) == ("q", "good", "bad")
