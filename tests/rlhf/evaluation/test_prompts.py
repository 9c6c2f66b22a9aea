"""Files of prompts: what they say, and the line that is wrong."""

import json
from pathlib import Path

from rlhf.evaluation.batch_generation import read_prompts
from rlhf.evaluation.comparison import different
from rlhf.types import Message


def test_prompts_of_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    dialogue = [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    file.write_text(json.dumps({"prompt": "a", "answer": 4}) + "\r\n\n" + json.dumps({"prompt": dialogue}))
    (first, a), (second, b) = read_prompts(str(file))
    assert (first, second) == (f"{file}:1", f"{file}:3")
    assert (a.prompt, a.columns) == ((Message("user", "a"),), {"answer": 4})
    assert b.prompt == (Message("system", "s"), Message("user", "b"))


def test_rows_that_differ_in_what_the_template_gets_are_different(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": "a", "chat_template_kwargs": {"enable_thinking": thinks}} for thinks in (True, False, True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [location for location, _ in different(read_prompts(str(file)))] == [f"{file}:1", f"{file}:2"]


def test_prompts_of_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbftell me\r\n\n  \n" + "über\u2028alles".encode())
    assert [row.prompt[0].content for _, row in read_prompts(str(file))] == ["tell me", "über\u2028alles"]
