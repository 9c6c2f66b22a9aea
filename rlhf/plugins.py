"""A folder is a registry: a name is a module in it, and the module has `Config` and `build`.

There is nothing to register, subclass or decorate. A user's own plug-in is the path of a Python file.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import yaml

from rlhf import errors
from rlhf.config import suggest, validate
from rlhf.errors import UserError

Spec = str | dict[str, Any]


def names(folder: str) -> list[str]:
    """The plug-ins of a package, by name. Imports none of them."""
    package = importlib.import_module(folder)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def find(folder: str, name: str) -> ModuleType:
    """The module behind a name of `folder`, or behind the path of a user's Python file.

    Raises: UserError that lists what there is and the nearest name.
    """
    if name.endswith(".py"):
        return load_file(name)
    known = names(folder)
    if name not in known:
        raise UserError(f"no '{name}' in {folder}; have {', '.join(known)}{suggest(name, known)}")
    return importlib.import_module(f"{folder}.{name}")


def load_file(path: str) -> ModuleType:
    """Import a user's Python file by path, under its whole path as name, so that `json.py` hides no other module.

    Raises: UserError when there is no such file.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"{path}: no such Python file")
    spec = importlib.util.spec_from_file_location(str(file), file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pydantic look annotations up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def parse_spec(spec: Spec) -> tuple[str, dict[str, Any]]:
    """`lora,r=8,targets=[q,v]` or `{name: lora, r: 8, targets: [q, v]}` as (name, options).

    Raises: UserError on an option without `=`, a value that is no YAML, or a mapping without a name.
    """
    if isinstance(spec, dict):
        options = {str(key).replace("-", "_"): value for key, value in spec.items()}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UserError(f"a plug-in written as a mapping needs a 'name', got {spec}")
        return name, options
    name, *pairs = re.split(r",(?![^\[{]*[\]}])", spec)  # at the commas outside brackets
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"'{spec}': got '{pair}', expected option=value after the name")
        options[key.strip().replace("-", "_")] = _value(spec, value)
    return name.strip(), options


def _value(spec: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"'{spec}': got '{text}', expected a value such as 8, 0.5, true, text or [a, b]") from None


def build(folder: str, spec: Spec, *args: Any) -> Any:
    """`module.build(Config(**options), *args)` of the plug-in that `spec` names.

    Raises: UserError on an unknown name, an unknown or bad option, or a file without `Config` and `build`.
    """
    name, options = parse_spec(spec)
    module = find(folder, name)
    missing = [need for need in ("Config", "build") if not hasattr(module, need)]
    if missing:
        raise UserError(f"{name}: has no {' and no '.join(missing)}; a plug-in has Config and build(config, ...)")
    where = name if name.endswith(".py") else f"{folder}.{name}"
    return module.build(validate(module.Config, options, where), *args)


class Blame:
    """Holds the exception that a user's code raises inside the block, which it ends.

    Not ours are: a UserError, which says all itself, a lack of memory, and what is no Exception (Ctrl-C, say).
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, UserError) or errors.ran_out(error):
            return False
        self.error = error
        return True


def where_it_failed(error: BaseException) -> str:
    """`my_reward.py:7: in score: KeyError: 'x'`, of the innermost line that is not in a library."""
    frames = traceback.extract_tb(error.__traceback__)[2:]  # the first two are our call
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if not own:
        return said
    return f"{own[-1].filename}:{own[-1].lineno}: in {own[-1].name}: {said}"
