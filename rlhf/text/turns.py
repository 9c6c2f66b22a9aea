"""An assistant turn as a chat template writes it: the prompt that asks for it, and what follows to its end.

The template is the truth. A dialogue is rendered twice: up to the generation prompt, and with the turn. What the second
rendering has beyond the first is the turn, with everything that the template writes into it: a closed block of
thoughts, a header, calls of tools, the end token.

Two kinds of templates write a turn otherwise than their generation prompt begins it. Those of DeepSeek-R1 open a
thought in the generation prompt and leave thoughts out of finished turns: the model would have written the thought, so
it is put back, or the open block is closed. Others add white space to the prompt only.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf.errors import UserError
from rlhf.text.rendering import MARK, Unrenderable, folded, message_dict, render, thought_of
from rlhf.text.templates import THOUGHT_END
from rlhf.types import Message

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPENED = re.compile(r"<([^<>/\s]+)>\s*$")
"""a tag that a generation prompt leaves open"""
CLOSED_EMPTY = re.compile(r"\s*<([^<>/\s]+)>\s*</\1>\s*")
CLOSED = "ends the thought in the prompt, and the response has one"


class Altered(Unrenderable):
    """A turn that the template does not write as the model would generate it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template {reason}", reason)


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Sequence[Sequence[Message]],
    variables: Sequence[Mapping[str, object]] = (),
    prompts: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """(prompt, turn) of each dialogue, whose last message is the assistant's. The turn ends with the template's text.

    prompts: as rendered, if they are known
    Raises: Unrenderable, Altered
    """
    prompts = prompts or render(tokenizer, [dialogue[:-1] for dialogue in dialogues], variables=variables)
    wholes = render(tokenizer, dialogues, add_generation_prompt=False, variables=variables)
    answers = [folded(dialogue[-1], str(tokenizer.chat_template)) for dialogue in dialogues]
    turns = []
    for i, (prompt, whole, answer) in enumerate(zip(prompts, wholes, answers, strict=True)):
        try:
            turns.append((prompt, turn_text(prompt, whole, answer)))
        except Altered:
            if len(dialogues[i]) == 2:
                raise
            # Mistral's template writes a system message only into a last user turn: the turn alone is regular.
            short = render_turns(tokenizer, [dialogues[i][-2:]], variables[i : i + 1])
            turns.append((prompt, short[0][1]))
    return turns


def turn_text(prompt: str, whole: str, answer: Message) -> str:
    """What follows the rendered `prompt` in the `whole` rendering, which ends in `answer`'s turn. Raises: Altered"""
    opened = OPENED.search(prompt)
    if whole.startswith(prompt):
        turn, opened = whole[len(prompt) :], None
    elif opened and whole.startswith(prompt[: opened.start()]):
        turn = whole[opened.start() :]
    elif whole.startswith(prompt.rstrip()):
        turn, opened = whole[len(prompt.rstrip()) :], None
    else:
        thinks = thought_of(answer) or THOUGHT_END in answer.content
        closed = thinks and prompt.rstrip().endswith(THOUGHT_END)
        raise Altered(CLOSED if closed else "writes the turn otherwise than its generation prompt begins it")
    turn = _with_whole_content(turn, answer.content, prompt)
    if opened:
        turn = _continue_block(turn, opened[0], opened[1])
    for name in _called(answer):
        if name not in turn:
            raise Altered(f"leaves out the call of {name}")
    thought = thought_of(answer).strip()
    if thought and thought not in turn:
        raise Altered("leaves out the thought of the last turn")
    return turn


def _with_whole_content(turn: str, content: str, prompt: str) -> str:
    """The turn, with the thought of the content put back if the template left it out."""
    if content.strip() in turn:
        return turn
    thought, end, answer = content.rpartition(THOUGHT_END)
    answer = answer.strip()
    if not end or answer not in turn:
        raise Altered("leaves out a part of the response")
    thought = thought.split("<think>")[-1].strip()
    if thought and prompt.rstrip().endswith(THOUGHT_END):
        raise Altered(CLOSED)
    if thought in turn:
        return turn  # the template writes the thought in another form
    before, _, after = turn.rpartition(answer) if answer else (turn, "", "")
    return CLOSED_EMPTY.sub("", before).rstrip().removesuffix(THOUGHT_END) + content.strip() + after


def _continue_block(turn: str, opened: str, tag: str) -> str:
    """The turn after a prompt that ends in `opened`, `<think>` and a line break: its own block, or a closed one."""
    end = f"</{tag}>"
    if end not in turn:
        return f"\n{end}\n\n{turn.lstrip()}"
    space = opened[opened.rindex(">") + 1 :]
    return turn.lstrip().removeprefix(f"<{tag}>").removeprefix(space)


def _called(message: Message) -> list[str]:
    """The names of the functions that a message calls."""
    calls = message.keys.get("tool_calls") or []
    return [str((call.get("function") or call).get("name", "")) for call in calls if isinstance(call, dict)]


def context_of(
    tokenizer: PreTrainedTokenizerBase, dialogue: Sequence[Message], variables: Mapping[str, Any], turn: str
) -> str:
    """The beginning of the last turn, before the template's `{% generation %}` block; empty without one."""
    template = str(tokenizer.chat_template)
    if not GENERATION.search(template):
        return ""
    rendered: Any = render_jinja_template(
        conversations=[[message_dict(message, tokenizer) for message in dialogue]],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **variables},
    )
    [whole], [blocks] = rendered
    start = len(whole) - len(turn)
    generated = [max(first - start, 0) for first, last in blocks if last > start]
    return turn[: generated[0]] if generated and whole.endswith(turn) else ""


def until_end(turn: str, ends: Sequence[str], after: str) -> tuple[str, str]:
    """(the turn before its end token, the end token). Without one: without what the template writes `after` a turn."""
    positions = [(position, -len(end), end) for end in ends if (position := turn.find(end)) >= 0]
    if positions:
        position, _, end = min(positions)
        return turn[:position], end
    return turn.removesuffix(after), ""


def turn_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the template writes (between the prompt and the assistant's content, after that content).

    Raises: UserError if the template refuses an assistant message.
    """
    [(_, turn)] = render_turns(tokenizer, [(Message("user", "x"), Message("assistant", MARK))])
    before, _, after = turn.partition(MARK)
    return before, after


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The added token with which the template ends an assistant turn; None if it ends in other text or in nothing."""
    try:
        _, after = turn_frame(tokenizer)
    except UserError:
        return None  # a template for single prompts
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if not str(token).isspace()]
    return max((token for token in tokens if after.lstrip().startswith(token)), key=len, default=None)


def thought_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the template writes (before a thought, between thought and answer); of the usual form if it writes none."""
    thought = MARK * 2
    answer = Message("assistant", MARK, {"reasoning_content": thought})
    try:
        [(_, turn)] = render_turns(tokenizer, [(Message("user", "x"), answer)])
    except Unrenderable:
        return "<think>", THOUGHT_END
    before, _, rest = turn.partition(thought)
    return before, rest.partition(MARK)[0]
