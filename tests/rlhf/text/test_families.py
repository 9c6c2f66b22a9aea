"""Templates of the most used families: prompt and target are what transformers renders of the whole dialogue."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.text.dialogues import Template
from rlhf.text.messages import unread
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Message, Row
from tests.support.texts import byte_tokenizer

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "hub_templates").glob("*.jinja"))
SPECIAL = re.compile(
    r"<[｜|][^<>{}'\"\s+]*[｜|]>|<(?:start|end)_of_turn>|\[(?:/?INST|/?TOOL_RESULTS|TOOL_CALLS)\]|<sop>"
)
SYSTEM, USER, OTHER = Message("system", "Be kind."), Message("user", "hi"), Message("user", "and </s>?")
ANSWER = Message("assistant", "It is.")
THINKING = Message("assistant", "It is.", {"reasoning_content": "Hm, 2."})
INLINE = Message("assistant", "<think>\nHm, 2.\n</think>\n\nIt is.")
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
CALL = Message("assistant", "", {"tool_calls": [
    {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"n": "0"}}}
]})  # fmt: skip
RESULT = Message("tool", "42", {"tool_call_id": "abcdefghi"})

PLAIN = [Row((USER,)), Row((SYSTEM, USER)), Row((USER, ANSWER, OTHER)), Row((SYSTEM, USER, ANSWER, OTHER))]
THINKERS = {"gpt_oss", "qwen3", "qwen3_5", "r1"}
"""families that have thoughts"""
CALLERS = {"gpt_oss", "llama_3_1_tools", "mistral", "qwen3", "qwen3_5"}


def family(name: str, variables: str | None = None) -> Template:
    path = Path(__file__).parent / f"hub_templates/{name}.jinja"
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(path.read_text())})})
    tokenizer.add_tokens(["<think>", "</think>"])
    return Template(prepare_tokenizer(tokenizer, str(path), variables))


def theirs(template: Template, row: Row, answer: Message) -> list[int]:
    """What transformers makes of the whole dialogue."""
    dicts = [{"role": m.role, "content": m.content, **m.keys} for m in (*row.prompt, answer)]
    ids = template.tokenizer.apply_chat_template(dicts, return_dict=False, **row.variables)
    assert isinstance(ids, list)
    return ids


def mine(template: Template, row: Row, answer: Message) -> tuple[list[int], list[int]]:
    assert not unread(replace(row, response=answer.content, response_keys=answer.keys), template.tokenizer)
    return template.prompt_ids(row.prompt, row.variables), template.turn_ids(row, answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_target_are_the_dialogue_that_transformers_renders(name: str) -> None:
    template = family(name)
    for row in PLAIN:
        if "</s>" in row.prompt[-1].content:  # transformers reads it as the end token
            row = replace(row, prompt=(*row.prompt[:-1], Message("user", "and?")))
        prompt, target = mine(template, row, ANSWER)
        whole = theirs(template, row, ANSWER)
        if name == "r1":  # its finished turns have no block of thoughts, which its generation prompt opens
            opened, closed = (template.tokenizer.encode(text) for text in ("<think>\n", "\n</think>\n\n"))
            assert prompt[-len(opened) :] == opened and target[: len(closed)] == closed
            prompt, target = prompt[: -len(opened)], target[len(closed) :]
        if name == "mistral" and row.prompt[0].role == "system":  # it loses the system message of a finished dialogue
            whole = [*prompt, *theirs(template, Row((USER,)), ANSWER)[len(template.prompt_ids((USER,))) :]]
        both = [*prompt, *target]
        rest = template.tokenizer.decode(whole[len(both) :]).strip()
        if name == "glm_4":  # it ends a turn with nothing
            assert (both[:-1], both[-1]) == (whole, template.tokenizer.eos_token_id)
        else:
            assert both == whole[: len(both)] and rest in ("", "</s>")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("answer", [THINKING, INLINE], ids=["beside", "inside"])
def test_a_thought_is_in_the_target_once_or_refused(name: str, answer: Message) -> None:
    template, row = family(name), Row((USER,), response=answer.content, response_keys=answer.keys)
    if name == "deepseek_v3":  # its generation prompt ends the thought, unless it is asked to think
        with pytest.raises(UserError, match="ends the thought in the prompt"):
            template.turn_ids(row, answer)
        template, row = family(name), replace(row, variables={"thinking": True})
    elif name not in THINKERS and answer is THINKING:
        assert "does not read the key 'reasoning_content'" in unread(row, template.tokenizer)
        return
    prompt, target = mine(template, row, answer)
    text = template.tokenizer.decode([*prompt, *target])
    assert text.count("Hm, 2.") == text.count("It is.") == 1
    assert max(text.count("<think>"), text.count("</think>"), text.count("analysis<|message|>")) == 1
    assert template.answer(target, template.tokenizer.decode(prompt)) == Message(
        "assistant", "It is.", {"reasoning_content": "Hm, 2."}
    )


def test_where_the_prompt_ends_the_thought_an_answer_may_have_an_empty_one() -> None:
    """As answers of Qwen3 without thoughts are stored."""
    template, row = family("qwen3", '{"enable_thinking": false}'), Row((USER,))
    empty = Message("assistant", f"<think>\n\n</think>\n\n{ANSWER.content}")
    assert template.turn_ids(row, empty) == template.turn_ids(row, ANSWER)
    with pytest.raises(UserError, match="ends the thought in the prompt"):
        template.turn_ids(row, Message("assistant", "Yes.", {"reasoning_content": "Hm."}))
    assert family("gpt_oss").turn_ids(row, empty) == family("gpt_oss").turn_ids(row, ANSWER)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_tools_are_learned_and_results_are_context_or_both_are_refused(name: str) -> None:
    template = family(name)
    rows = [(Row((USER,), variables=TOOLS), CALL), (Row((USER, CALL, RESULT), variables=TOOLS), ANSWER)]
    for row, answer in rows:
        whole = replace(row, response=answer.content, response_keys=answer.keys)
        if name not in CALLERS:
            assert re.search("does not (read|write)", unread(whole, template.tokenizer))
            continue
        prompt, target = (template.tokenizer.decode(ids) for ids in mine(template, row, answer))
        assert "Looks." in prompt or name in ("gpt_oss", "llama_3_1_tools")  # short fixtures
        assert ("look" in target, "42" in prompt) == (answer is CALL, answer is ANSWER)
        theirs_text = template.tokenizer.decode(theirs(template, row, answer))
        if name != "mistral":
            assert theirs_text.startswith(prompt + target)
        assert "</s>" not in target[:-4] and target.count("<|call|>") == (name == "gpt_oss" and answer is CALL)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_is_learned_as_it_would_have_been_generated(name: str) -> None:
    """Either an earlier turn's tokens are those of a last turn, or the template is known to rewrite turns."""
    template, row = family(name), Row((USER, ANSWER, OTHER))
    if template.rewrites_turns(row):
        assert name in THINKERS
        return
    ids, flags = template.prompt_ids_and_turns(row)
    marked = [i for i, flag in zip(ids, flags, strict=True) if flag]
    target = template.turn_ids(Row((USER,)), ANSWER)
    assert marked in (target, target[:-1])
    assert ids == template.prompt_ids(row.prompt)


def test_a_thinking_template_gets_its_variables_as_defaults() -> None:
    usual, off = family("qwen3"), family("qwen3", '{"enable_thinking": false}')
    block = "<think>\n\n</think>\n\n"
    assert off.prompt_text((USER,)) == usual.prompt_text((USER,)) + block
    assert off.prompt_text((USER,)) == usual.prompt_text((USER,), {"enable_thinking": False})
    assert off.prompt_text((USER,), {"enable_thinking": True}) == usual.prompt_text((USER,))
    assert "<think>" not in off.tokenizer.decode(off.turn_ids(Row((USER,)), ANSWER))
    again = prepare_tokenizer(off.tokenizer, "auto", '{"enable_thinking": false}')  # as saved with a model
    assert again.chat_template == off.tokenizer.chat_template
    with pytest.raises(UserError, match=r"does not read 'enable_thinkin' \(did you mean 'enable_thinking'"):
        family("qwen3", '{"enable_thinkin": false}')


def test_the_time_is_the_same_on_every_day() -> None:
    template = family("llama_3_dated")
    assert "Today Date: 2026" in template.prompt_text((USER,))
    assert prepare_tokenizer(template.tokenizer, "auto").chat_template == template.tokenizer.chat_template


def test_what_a_message_spells_is_no_token_of_the_template_in_keys_either() -> None:
    template = family("qwen3")
    call = {"type": "function", "function": {"name": "f<|im_end|>", "arguments": {}}}
    answer = Message("assistant", "<|im_start|>", {"tool_calls": [call], "reasoning_content": "<|im_end|>"})
    target = template.turn_ids(Row((USER,)), answer)
    special = template.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [i for i in target if i in special] == special[1:] == target[-1:]
    assert template.tokenizer.decode(target).count("<|im_end|>") == 3
    tools = {"tools": [{"type": "function", "function": {**FUNCTION, "description": "Looks.<|im_end|>"}}]}
    usual, spelling = template.prompt_ids((USER,), TOOLS), template.prompt_ids((USER,), tools)
    assert usual.count(special[1]) == spelling.count(special[1]) > 0
    assert template.tokenizer.decode(spelling).count("<|im_end|>") == spelling.count(special[1]) + 1


def test_an_unended_thought_has_no_answer() -> None:
    template = family("qwen3_5")
    ids = template.turn_ids(Row((USER,)), THINKING)
    cut = ids[: -len("It is.") - 3]
    prompt = template.prompt_text((USER,))
    assert template.answer(cut, prompt) == Message("assistant", "", {"reasoning_content": "Hm, 2."})
    assert template.answer(template.turn_ids(Row((USER,)), ANSWER), prompt) == ANSWER
    assert template.response_text(template.turn_ids(Row((USER,)), ANSWER)) == "It is."
    other = family("qwen3")
    assert other.answer(other.tokenizer.encode("\n<think>Hm, 2."), other.prompt_text((USER,))).content == ""
    for second, content in {"</think>\n\n<think>Or 3.": "", "</think>It is 2. <think>Or 3.": "It is 2."}.items():
        again, whole = (t.tokenizer.encode(f"<think>Hm.{second}") for t in (template, other))
        assert template.answer(again, prompt).content.strip() == content
        assert other.answer(whole, other.prompt_text((USER,))).content.strip() == content


@pytest.mark.parametrize(
    ("name", "variables", "thinks"),
    [
        ("qwen3_5", {}, True),
        ("qwen3_5", {"enable_thinking": False}, False),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"thinking": True}, True),
        ("qwen3", {"enable_thinking": False}, False),
    ],
)
def test_a_row_says_whether_its_response_begins_in_a_thought(
    name: str, variables: dict[str, Any], thinks: bool
) -> None:
    template = family(name)
    prompt, ids = template.prompt_text((USER,), variables), template.tokenizer.encode("It is 2.")
    content, keys = ("", {"reasoning_content": "It is 2."}) if thinks else ("It is 2.", {})
    assert template.answer(ids, prompt) == Message("assistant", content, keys)
