"""Settings that come from elsewhere: a DeepSpeed JSON of the user, and `accelerate launch`. Torch-free.

They are laid over the defaults and under what the user wrote for this project; where both differ, the run is refused.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from rlhf.config import accelerate_settings, deepspeed_json
from rlhf.config.deepspeed_json import Setting, Settings
from rlhf.config.parser import Config, peek
from rlhf.config.record import Tree
from rlhf.errors import UserError

CONFIG = "deepspeed-config"
"""the option that names the JSON"""


def plain_words(words: Sequence[str]) -> list[str]:
    """A command line as DeepSpeed's tutorials write it, in the words of this project.

    `--local_rank N`, which the deepspeed launcher adds, is dropped; `--deepspeed` alone too, because every stage runs
    under DeepSpeed; `--deepspeed FILE`, as transformers writes it, is `--deepspeed-config FILE`.
    """
    return list(_plain_words(list(words)))


def _plain_words(words: list[str]) -> Iterator[str]:
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        follows = bool(words) and not words[0].startswith("-")
        if name == "--local-rank":
            if not equals and words and re.fullmatch(r"-?\d+", words[0]):
                del words[0]
        elif name == "--deepspeed":
            if equals or follows:
                yield f"--{CONFIG}={value if equals else words.pop(0)}"
        elif name == "--num-accelerators":
            yield f"--num-gpus{equals}{value}"
        else:
            yield word


def read(argv: Sequence[str], section: str = "", environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings for a command line, or for one section of its options.

    Raises: UserError for a setting that this project cannot follow, or two that contradict each other.
    """
    launched = dict(accelerate_settings.settings(environment))
    path = peek(argv, f"{section}.{CONFIG}" if section else CONFIG, "")
    if section and not path:
        path = peek(argv, CONFIG, "")
    named = launched.get("deepspeed_config")
    if named is not None and path not in ("", named.value):
        raise UserError(f"--{CONFIG} {path}: got it with {named.source}; expected one file")
    path = path or (named.value if named else "")
    result = dict(deepspeed_json.settings(path)) if path else {}
    for option, setting in launched.items():
        other = result.setdefault(option, setting)
        if other.value != setting.value:
            raise UserError(f"{setting.source}: {other.source} says otherwise; expected one value")
    return result


def values(settings: Settings, cls: type[Config]) -> Tree:
    """The settings of options that the class has, by option."""
    return {name: setting.value for name, setting in _own(settings, cls)}


def _own(settings: Settings, cls: type[Config]) -> Iterator[tuple[str, Setting]]:
    for name, setting in settings.items():
        if name == "batch_size" and getattr(cls, "STEP_ROWS", None) != name:
            continue  # its rows are not those of an optimizer step
        if name in cls.model_fields:
            yield name, setting


def step_sizes(path: str | None, environment: Mapping[str, str] = os.environ) -> Settings:
    """The sizes of an optimizer step that the JSON at `path` and accelerate name, by the JSON's key."""
    result = {}
    for key, value in deepspeed_json.read(path).items() if path else ():
        if key in (deepspeed_json.STEP_ROWS, deepspeed_json.ACCUMULATION):
            result[key] = Setting(value, f"{path}: {key} {value}")
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if accumulation != "auto":
        source = f"accelerate launch (ACCELERATE_GRADIENT_ACCUMULATION_STEPS={accumulation})"
        result.setdefault(deepspeed_json.ACCUMULATION, Setting(int(accumulation), source))
    return result


def require_agreement(settings: Settings, config: Config, section: str = "") -> None:
    """Raises: UserError if an option has another value than a setting asks for: the user wrote both."""
    for name, setting in _own(settings, type(config)):
        value = getattr(config, name)
        if value != setting.value:
            option = f"{section}.{name}" if section else name
            raise UserError(
                f"--{option.replace('_', '-')} {value}: got it with {setting.source}; expected the same value in both, "
                "or in one only"
            )
