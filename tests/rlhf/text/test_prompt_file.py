"""Files of prompts: what they say, and the line that is wrong."""

import json
from pathlib import Path

import pytest

from rlhf import errors
from rlhf.text.prompt_file import different, read_prompts
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


BAD_LINES = {
    "no JSON": (b"{'prompt': 1}", ["not valid JSON"]),
    "a repeated key": (b'{"prompt": "a", "prompt": "b"}', ['the key "prompt" is repeated']),
    "no number": (b'{"prompt": "a", "x": NaN}', ["got NaN"]),
    "no object": (b'["a"]', ["got an array"]),
    "no prompt": (b'{"promt": "a"}', ["no column 'prompt'", "promt"]),
    "a number": (b'{"prompt": 3}', ["prompt: got 3"]),
    "null": (b'{"prompt": null}', ["prompt: got null"]),
    "blank": (b'{"prompt": " "}', ['prompt: got " "']),
    "a transcript": (b'{"prompt": "\\n\\nHuman: Hi\\n\\nAssistant:"}', ["got a transcript", "its turns as messages"]),
    "no messages": (b'{"prompt": []}', ["prompt: got []"]),
    "another role": (b'{"prompt": [{"role": "cook", "content": "a"}]}', ["prompt[0]", "system, user"]),
    "no content": (b'{"prompt": [{"role": "user"}]}', ["prompt[0].content: got null"]),
    "the assistant's turn": (b'{"prompt": [{"role": "assistant", "content": "a"}]}', ["role 'assistant'"]),
    "other bytes": (b'{"prompt": "\xe9"}', ["byte 0xe9 at offset 12", "UTF-8"]),
    "half a letter": (b'{"prompt": "\\ud800"}', ["surrogate"]),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name: str, tmp_path: Path) -> None:
    line, words = BAD_LINES[name]
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(errors.UserError) as mistake:
        read_prompts(str(file))
    message = str(mistake.value)
    assert message.startswith(f"{file}:2: ") and "\n" not in message
    assert all(word in message for word in words), message
