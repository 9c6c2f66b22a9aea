"""Chat templates by name, and from Jinja files of the user's."""

import contextlib
import re
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from rlhf.config import suggest
from rlhf.errors import UserError

MAX_TEMPLATE = 100_000
"""characters; a longer one is refused"""

NAMES = {
    "messages", "tools", "documents", "add_generation_prompt",
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner",
}  # fmt: skip
"""What every template can name."""

BUILT_IN = {
    # The text as it is. A language model needs one token to start from, hence EOS where there is no BOS.
    "plain": "{{ bos_token if bos_token else eos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    # As Anthropic's HH dialogues are written; a system message stands before the first turn.
    "human_assistant": (
        "{% if bos_token %}{{ bos_token }}{% endif %}{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}{{ '\n\nAssistant: ' }}"
        "{% elif m['role'] != 'system' %}{{ '\n\nHuman: ' }}{% endif %}"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
    ),
    # Models made for this format have '<|im_start|>' as their BOS: it is not written twice.
    "chatml": (
        "{% if bos_token and bos_token != '<|im_start|>' %}{{ bos_token }}{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # As Llama 2 Chat was trained: BOS and EOS around each exchange, the system message inside the user's next turn.
    # Turns that do not alternate are written too; the reference refuses them.
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
    # Stanford Alpaca's frame; a system message takes the place of its first sentence, and each response ends in EOS.
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


def find_template(name: str, own: Any) -> str:
    """The text of the template that `name` stands for: 'auto', a name in BUILT_IN ('-' for '_' too), or a Jinja file.

    `own`: the chat_template of the tokenizer, which 'auto' means; human_assistant where it has none.
    Raises: UserError for an unknown name, or a file that is no template.
    """
    if name == "auto":
        own = own.get("default") if isinstance(own, dict) else own
        if not own:
            return BUILT_IN["human_assistant"]
        if not isinstance(own, str):
            raise UserError(f"--chat-template auto: got a {type(own).__name__} for the tokenizer's own, expected text")
        with contextlib.suppress(jinja2.TemplateSyntaxError):  # which rendering names
            _parse(own, "--chat-template auto")
        return own
    known = name.replace("-", "_")
    return BUILT_IN[known] if known in BUILT_IN else _read_template(name)


def template_name(text: str) -> str | None:
    """The name in BUILT_IN of a template's text; None for others."""
    return next((name for name, built_in in BUILT_IN.items() if built_in == text), None)


def _read_template(path: str) -> str:
    if not Path(path).is_file():
        known = ["auto", *BUILT_IN]
        raise UserError(f"no chat template '{path}'; have {', '.join(known)}, or a Jinja file{suggest(path, known)}")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: got byte 0x{error.object[error.start]:02x}, expected a chat template in UTF-8"
        ) from None
    _refuse_unknown_names(text, path)
    return text


def _parse(text: str, where: str) -> jinja2.nodes.Template:
    """A template's syntax tree; nothing of it is run.

    Raises: UserError for a template that is too long, too deep, or raises to a power: a number with a thousand million
    digits is one operation, which no clock interrupts. TemplateSyntaxError.
    """
    if len(text) > MAX_TEMPLATE:
        raise UserError(f"{where}: got {len(text)} characters, expected a chat template of at most {MAX_TEMPLATE}")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    try:
        # transformers knows one more tag, which marks what an assistant says
        tree = environment.parse(re.sub(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}", "", text))
        power = next(tree.find_all(jinja2.nodes.Pow), None)
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply for a chat template") from None
    if power is not None:
        raise UserError(f"{where}: the chat template, line {power.lineno}, raises to a power (**), which it may not")
    return tree


def _refuse_unknown_names(text: str, path: str) -> None:
    """Jinja writes nothing for a name it does not know, so a mistyped one would leave messages out in silence.

    Raises: UserError with the line of a syntax error, or of an unknown name that nothing tests with `is defined`.
    """
    try:
        tree = _parse(text, path)
        unknown = jinja2.meta.find_undeclared_variables(tree) - NAMES
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: not a chat template: {error.message}") from None
    for guard in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter)):
        if guard.name in ("defined", "undefined", "default", "d") and isinstance(guard.node, jinja2.nodes.Name):
            unknown.discard(guard.node.name)
    for node in tree.find_all(jinja2.nodes.Name):
        if node.name in unknown:
            raise UserError(
                f"{path}:{node.lineno}: the chat template knows no '{node.name}'{suggest(node.name, sorted(NAMES))}; "
                f"an optional name is tested with '{node.name} is defined' first"
            )
