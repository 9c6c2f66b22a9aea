"""What messages carry beside role and content: flags of the loss, thoughts, calls of tools, labels."""

from typing import Any

import pytest

from data.config import DataOptions
from data.prepare.encode import Demonstration, Recipe, RowEncoder, divided
from data.prepare.gather import row_from_json, row_to_json
from data.prepare.owners import unusable_reason
from data.read.records import Skipped
from data.sources.files import parse
from rlhf.errors import UserError
from rlhf.text.dialogues import Template
from rlhf.text.messages import FLAGS, read_message
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Message, Row
from tests.support.texts import byte_tokenizer

ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
LOOK = {"name": "look", "arguments": {"n": 1}}


def read(*messages: dict[str, Any], **columns: Any) -> Row:
    row = parse({"messages": list(messages), **columns}, "f.jsonl:3")
    assert isinstance(row, Row)
    return row


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("off", [0, False, 0.0])
def test_a_flag_against_the_loss_makes_a_turn_context(flag: str, off: Any) -> None:
    row = read(ASK, SAY, ASK, {**SAY, flag: off})
    assert (row.prompt, row.response) == ((Message("user", "q"),), "a")  # the last learned turn
    earlier = read(ASK, {**SAY, flag: off}, ASK, {**SAY, flag: 1})
    assert [message.learned for message in earlier.prompt] == [True, False, True]
    assert (earlier.response, earlier.weight) == ("a", 1)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_row_without_a_learned_turn_serves_as_a_prompt_only(flag: str) -> None:
    row = read(ASK, {**SAY, flag: 0})
    assert [unusable_reason(row, phase) for phase in ("sft", "ppo")] == ["weight 0", ""]
    side = {"chosen": [{**SAY, flag: False}], "rejected": [{**SAY, "content": "b"}]}
    pair = parse({"prompt": "q", **side}, "f:1")
    assert isinstance(pair, Row) and unusable_reason(pair, "reward") == "weight 0"


def test_the_weight_of_a_row() -> None:
    assert read(ASK, SAY, weight=0.25).weight == 0.25
    assert read(ASK, SAY, weight=None).weight == 1
    assert unusable_reason(read(ASK, SAY, weight=0), "sft") == "weight 0"
    for bad in (-1, "much", True, float("inf")):
        with pytest.raises(UserError, match=r"f\.jsonl:3: weight: got .*, expected a number of at least 0"):
            read(ASK, SAY, weight=bad)


def test_thoughts_and_calls_are_kept_and_labels_are_not() -> None:
    labels = {"id": "x1", "timestamp": 3, "language": "en", "weight": 1, "tool_calls": [], "name": None}
    row = read({**ASK, **labels}, {**SAY, **labels, "reasoning_content": "hm"})
    assert (row.prompt, row.response_keys) == ((Message("user", "q"),), {"reasoning_content": "hm"})
    called = read(ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": LOOK}]})
    assert called.response == ""
    assert called.response_keys == {"tool_calls": [{"id": "c", "type": "function", "function": LOOK}]}
    assert not unusable_reason(called, "sft")


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": LOOK},
        {"function": {"name": "look", "arguments": '{"n": 1}'}},  # as OpenAI writes arguments
        LOOK,
    ],
)
def test_calls_in_every_form_become_one(call: dict[str, Any]) -> None:
    expected = [{"type": "function", "function": LOOK}]
    assert read(ASK, {**SAY, "tool_calls": [call]}).response_keys == {"tool_calls": expected}


def test_calls_as_share_gpt_writes_them() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"n": 1}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "It is 42."},
    ]
    row = parse({"conversations": turns, "tools": '[{"name": "look"}]'}, "f:1")
    assert isinstance(row, Row)
    call = Message("assistant", "", {"tool_calls": [{"type": "function", "function": LOOK}]})
    assert row.prompt == (Message("user", "q"), call, Message("tool", "42"))
    assert (row.response, row.variables) == ("It is 42.", {"tools": [{"name": "look"}]})


def test_content_in_parts_of_text_is_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert read_message({"role": "user", "content": parts}, "here") == Message("user", "a b")


def test_consecutive_turns_join_unless_something_distinguishes_them() -> None:
    row = read(ASK, ASK, {**SAY, "weight": 0}, SAY, ASK, {**SAY, "reasoning_content": "hm"})
    assert [message.content for message in row.prompt] == ["q\n\nq", "a", "a", "q"]
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert len(read(ASK, {**SAY, "tool_calls": [LOOK]}, *results, SAY).prompt) == 4


def test_rows_come_back_from_the_file_of_the_tokenizer() -> None:
    row = read(
        ASK, {**SAY, "weight": 0}, ASK, {**SAY, "thinking": "hm"},
        tools=[{"name": "f"}], weight=2, chat_template_kwargs='{"enable_thinking": false}',
    )  # fmt: skip
    assert row.variables == {"tools": [{"name": "f"}], "enable_thinking": False}
    back = row_from_json(row_to_json(row, "sft"))
    assert (back.prompt, back.response_keys, back.variables, back.weight) == (
        row.prompt, row.response_keys, row.variables, 2,
    )  # fmt: skip


def template(source: str) -> Template:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = source
    return Template(prepare_tokenizer(tokenizer, "auto"))


BODY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (read(ASK, {**SAY, "reasoning_content": "hm"}), "does not read the key 'reasoning_content' of a message"),
        (read(ASK, {**SAY, "mood": "good"}), "does not read the key 'mood' of a message"),
        (read(ASK, SAY, tools=[{"name": "f"}]), "does not read 'tools'"),
        (read(ASK, SAY, chat_template_kwargs={"deep": 1}), "does not read 'chat_template_kwargs.deep'"),
        (read(ASK, SAY, chat_template_kwargs={"messages": []}), "does not read 'chat_template_kwargs.messages'"),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_its_place(row: Row, reason: str) -> None:
    [result] = divided(template(BODY + ASKS), Recipe("sft", "last"), row)
    assert isinstance(result, Skipped) and result.bad
    assert result.reason.startswith(f"f.jsonl:3: the chat template {reason}") and "--chat-template" in result.reason
    [kept] = divided(template(BODY + ASKS), Recipe("sft", "last"), read(ASK, SAY))
    assert kept == read(ASK, SAY)


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_role_that_the_template_does_not_write_is_refused(role: str) -> None:
    hides = "{% for m in messages if m.role != '" + role + "' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    as_user = "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}{{ m.content }}{% endfor %}"
    turns = (
        [{"role": "system", "content": "s"}, ASK] if role == "system" else [ASK, SAY, {"role": role, "content": "1"}]
    )
    row = read(*turns, SAY)
    for source in (hides, as_user) if role == "tool" else (hides,):
        [result] = divided(template(source), Recipe("sft", "last"), row)
        assert isinstance(result, Skipped) and f"does not write messages of the role {role}" in result.reason
    assert list(divided(template(BODY + ASKS), Recipe("sft", "last"), row)) == [row]


def test_a_generation_block_says_what_of_a_turn_is_learned() -> None:
    marked = "[assistant](note){% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}"
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + marked + "{% else %}[user]{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ours = template(source)
    for loss_on in ("last", "every"):
        [(item, _)] = RowEncoder(Recipe("sft", loss_on), ours, DataOptions())([read(ASK, SAY, ASK, SAY)])  # type: ignore[misc]
        assert isinstance(item, Demonstration)
        learned = [ours.tokenizer.decode(item.ids[start:end]) for start, end in item.spans]
        assert learned == ["a</s>"] * (1 if loss_on == "last" else 2)
        assert ours.tokenizer.decode(item.ids).endswith("[user]q[assistant](note)a</s>")


def test_every_turn_of_a_template_that_drops_old_thoughts_has_a_row_of_its_own() -> None:
    forgets = (
        "{% for m in messages %}[{{ m.role }}]{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}" + ASKS
    )
    thinking = {**SAY, "thinking": "hm"}
    row = read(ASK, thinking, ASK, {**thinking, "weight": 0}, ASK, thinking)
    first, last = divided(template(forgets), Recipe("sft", "every"), row)
    assert isinstance(first, Row) and isinstance(last, Row)
    assert (len(first.prompt), len(last.prompt)) == (1, 5)
    assert first.response_keys == last.response_keys == {"thinking": "hm"}
    assert not any(message.learned for part in (first, last) for message in part.prompt if message.role == "assistant")
    assert list(divided(template(forgets), Recipe("sft", "last"), row)) == [row]
    assert list(divided(template(BODY + ASKS), Recipe("sft", "every"), read(ASK, SAY, ASK, SAY))) == [
        read(ASK, SAY, ASK, SAY)
    ]


def test_every_turn_of_a_dialogue_with_calls_is_learned_where_the_prompt_closes_the_thought() -> None:
    """As Qwen3.5's small models do. The template needs the tools as they are: gpt-oss reads their descriptions."""
    ours = template(
        "{% for t in tools or [] %}{{ 'tool ' + t.description + eos_token }}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think></think>{% endif %}"
    )
    calls = {**SAY, "tool_calls": [{"function": LOOK}]}
    row = read(
        ASK, calls, {"role": "tool", "content": "1"}, SAY, ASK, SAY, tools=[{"name": "look", "description": "d"}]
    )
    rows = [part for part in divided(ours, Recipe("sft", "every"), row) if isinstance(part, Row)]
    learned = []
    for item, _ in RowEncoder(Recipe("sft", "every"), ours, DataOptions())(rows):  # type: ignore[misc]
        assert isinstance(item, Demonstration)
        learned += [ours.tokenizer.decode(item.ids[start:end]) for start, end in item.spans]
    assert learned == ["alook</s>", "a</s>", "a</s>"]
