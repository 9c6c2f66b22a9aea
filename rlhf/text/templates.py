"""Chat templates: built-in ones by name, and those of the user's Jinja files."""

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from rlhf.config import suggest
from rlhf.errors import UserError

THOUGHT_TAG = "think>"
THOUGHT_END = "</think>"
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""keys under which data has the thought before an answer"""

RESERVED = frozenset(("messages", "conversation", "add_generation_prompt", "tokenize", "chat_template", "return_dict"))
"""names that no row may give to a template"""

BUILT_IN = {
    # The text without a frame. A language model needs a first token, hence EOS if there is no BOS.
    "plain": "{{ bos_token if bos_token else eos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    # The format of Anthropic's HH dialogues; a system message comes before the first turn.
    "human_assistant": (
        "{% if bos_token %}{{ bos_token }}{% endif %}{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}{{ '\n\nAssistant: ' }}"
        "{% elif m['role'] != 'system' %}{{ '\n\nHuman: ' }}{% endif %}"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
    ),
    # If '<|im_start|>' is the model's BOS, it is not written twice.
    "chatml": (
        "{% if bos_token and bos_token != '<|im_start|>' %}{{ bos_token }}{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # The format of Llama 2 Chat: BOS and EOS around each exchange, the system message inside the next user turn.
    # Unlike the reference, it accepts turns that do not alternate.
    "llama_2": (
        "{% set bos = bos_token if bos_token else '' %}{% set before = namespace(system='') %}"
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set before.system = before.system + '<<SYS>>\n' + m['content'] + '\n<</SYS>>\n\n' %}"
        "{% elif m['role'] == 'user' %}"
        "{{ bos + '[INST] ' + (before.system + m['content']).strip() + ' [/INST]' }}{% set before.system = '' %}"
        "{% else %}{% if before.system %}{{ bos + '[INST] ' + before.system.strip() + ' [/INST]' }}"
        "{% set before.system = '' %}{% elif loop.first %}{{ bos }}{% endif %}"
        "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
        "{% if before.system %}{{ bos + '[INST] ' + before.system.strip() + ' [/INST]' }}{% endif %}"
    ),
    "llama_3": (
        "{% if bos_token %}{{ bos_token }}{% endif %}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'].strip() + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # The format of Stanford Alpaca; a system message replaces its first sentence, and each response ends in EOS.
    "alpaca": (
        "{% if bos_token %}{{ bos_token }}{% endif %}{% if messages[0]['role'] != 'system' %}"
        "{{ 'Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n' }}{% endif %}"
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + '\n\n' }}"
        "{% elif m['role'] == 'user' %}{{ '### Instruction:\n' + m['content'] + '\n\n' }}"
        "{% else %}{{ '### Response:\n' + m['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
}


@dataclass(frozen=True, slots=True)
class TemplateWords:
    """What a template reads."""

    variables: frozenset[str]
    """names beside the messages"""
    keys: frozenset[str]
    """attributes and texts, among them the keys of messages"""


@lru_cache(maxsize=64)
def words_of(text: str) -> TemplateWords:
    """What a template reads; nothing if it is no template."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    try:  # without a tag that only transformers has, which marks assistant turns
        tree = environment.parse(re.sub(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}", "", text))
    except (jinja2.TemplateSyntaxError, RecursionError):  # rendering reports it
        return TemplateWords(frozenset(), frozenset())
    attributes = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    texts = {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
    return TemplateWords(frozenset(names), frozenset(attributes | texts))


def thought_form(text: str) -> Literal["inside", "beside", "both", "none"]:
    """Where a template reads the thought before an answer: inside a message's content, as those of DeepSeek-R1 do,
    beside it, as those of gpt-oss do, or both."""
    keys = words_of(text).keys
    beside = bool(keys & {*THOUGHT_KEYS})
    inside = any(THOUGHT_END in key for key in keys)
    if beside:
        return "both" if inside else "beside"
    return "inside" if inside else "none"


DATE = "2026-01-01"
"""what a template that asks for the time is told, so that a run is the same on every day"""


def with_defaults(template: str, variables: Mapping[str, object]) -> str:
    """The template with a value for each variable that it is not given, and with DATE as the time.

    Raises: UserError for a variable that the template does not read.
    """
    words = words_of(template)
    unread = sorted(set(variables) - words.variables)
    if unread:
        hint = suggest(unread[0], sorted(words.variables))
        raise UserError(f"--chat-template-kwargs: the chat template does not read '{unread[0]}'{hint}")
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in variables.items()
    ]
    if "strftime_now" in words.variables and "macro strftime_now" not in template:
        lines.append(_fixed_time())
    prefix = "".join(lines)
    # A text after the last tag keeps the template's first line break, which Jinja would drop.
    return template if not lines or prefix in template else f"{prefix}{{{{ '' }}}}{template}"


def _literal(value: object) -> str:
    """A JSON value as an expression of Jinja."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_literal(item)}' for key, item in value.items())}}}"
    return "none" if value is None else json.dumps(value)


def _fixed_time() -> str:
    """A macro that replaces transformers' `strftime_now`."""
    codes = [*"aAdbBmyYHIpMSjUwWfZzcxXDFTRe", *("-" + code for code in "dmyHIMSj")]
    time = datetime.datetime.fromisoformat(DATE)
    replaced = "".join(f".replace('%{code}', '{time.strftime('%' + code)}')" for code in codes)
    return "{%- macro strftime_now(format) -%}{{ format" + replaced + " }}{%- endmacro %}"


def find_template(name: str, tokenizer_template: object) -> str:
    """The text of a template. name: 'auto', a name in BUILT_IN ('-' may replace '_'), or a Jinja file.

    tokenizer_template: the tokenizer's chat_template, which 'auto' selects; without one it selects human_assistant
    Raises: UserError for an unknown name, or a file that is not in UTF-8.
    """
    if name == "auto":
        if isinstance(tokenizer_template, dict):
            tokenizer_template = tokenizer_template.get("default")
        if not tokenizer_template:
            return BUILT_IN["human_assistant"]
        return str(tokenizer_template)
    built_in_name = name.replace("-", "_")
    if built_in_name in BUILT_IN:
        return BUILT_IN[built_in_name]
    if not Path(name).is_file():
        known = ["auto", *BUILT_IN]
        raise UserError(f"no chat template '{name}'; have {', '.join(known)}, or a Jinja file{suggest(name, known)}")
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"chat template {name}: byte {error.start} is not UTF-8; expected a Jinja file in UTF-8"
        ) from error


def template_name(text: str) -> str | None:
    """The name in BUILT_IN of a template's text; None for others."""
    return next((name for name, built_in in BUILT_IN.items() if built_in == text), None)
