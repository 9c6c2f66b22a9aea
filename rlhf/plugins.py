"""A folder is a registry: a name is a module in it, and the module has `Config` and `build`.

There is nothing to register, subclass or decorate. A user's own plug-in is the path of a Python file. Plug-ins of one
shape are rows of one table, `ROWS` of the folder's module `_table`, instead of a module each.
"""

import importlib
import importlib.util
import inspect
import itertools
import json
import math
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from rlhf import errors
from rlhf.config import Tree, suggest, validate
from rlhf.config.foreign_options import METHODS, plain
from rlhf.config.yaml_files import from_yaml
from rlhf.errors import UserError
from rlhf.shipped import PACKAGES

Spec = str | Tree
Plugin = TypeVar("Plugin")
T = TypeVar("T")


def names(folder: str) -> list[str]:
    """The plug-ins of a package, by name. Imports none of its modules but the table."""
    return sorted({*(name for name in _modules(folder) if not name.startswith("_")), *_table(folder)})


def _modules(folder: str) -> list[str]:
    package = find_spec(folder)  # which is not imported: it may import torch
    assert package is not None
    return [module.name for module in pkgutil.iter_modules(package.submodule_search_locations)]


def _table(folder: str) -> Any:
    """The rows of the package's table by name, with the members that a module has; none if it has no table."""
    return importlib.import_module(f"{folder}._table").ROWS if "_table" in _modules(folder) else {}


def find(folder: str, name: str) -> Any:
    """The plug-in: the module or row named `name` in `folder`, or the user's Python file at the path `name`.

    Raises: UserError for an unknown name, with the existing and the most similar name, or for a file without `Config`
    and `build`.
    """
    if name.endswith(".py"):
        plugin: Any = load_file(name)
    elif name in _modules(folder) and not name.startswith("_"):
        plugin = importlib.import_module(f"{folder}.{name}")
    elif name in (table := _table(folder)):
        plugin = table[name]
    else:
        raise unknown(folder, name)
    missing = [member for member in ("Config", "build") if not hasattr(plugin, member)]
    if missing:
        raise UserError(f"{name}: has no {' and no '.join(missing)}; a plug-in has Config and build(config, ...)")
    return plugin


def unknown(folder: str, name: str) -> UserError:
    """The error that there is no such plug-in, with what there is."""
    method, available = METHODS.get(plain(name)), names(folder)
    if method is not None:
        return UserError(f"no '{name}' in {folder}; write {method}")
    return UserError(f"no '{name}' in {folder}; have {', '.join(available)}{suggest(plain(name), available)}")


def load_file(path: str) -> ModuleType:
    """Import a user's Python file. Its module name is the whole path, so that `json.py` hides no other module.

    A process executes a file only once, unless the file has changed; so a model in it is loaded once.
    Raises: UserError if there is no such file, or it raises an exception.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"{path}: no such Python file")
    content, loaded = file.read_bytes(), sys.modules.get(str(file))
    if loaded is not None and loaded.__spec__ is not None and loaded.__spec__.loader_state == content:
        return loaded
    spec = importlib.util.spec_from_file_location(str(file), file)
    assert spec is not None and spec.loader is not None
    spec.loader_state = content
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pydantic resolve annotations there
    caught = CatchUserCode()
    try:
        with caught:
            spec.loader.exec_module(module)
        if caught.error is not None:
            cure = _cure_of_import(file, caught.error)
            raise UserError(f"{path}: cannot be imported: {error_location(caught.error)}{cure}") from caught.error
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _cure_of_import(file: Path, error: BaseException) -> str:
    """What to do if the user's file imports a module beside it, absolutely or relatively; else an empty string."""
    name = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    beside = file.parent / name.partition(".")[0]
    is_relative = name == str(file.with_suffix(""))
    if name and (is_relative or beside.is_dir() or beside.with_suffix(".py").is_file()):
        return f"; expected an absolute import, and PYTHONPATH={file.parent} before the command"
    return ""


def module_file(name: str) -> Path | None:
    """The file of a user's module, `package.module`; None if there is none, or it is the pipeline's own."""
    spec = None
    with CatchUserCode():  # the package is imported
        spec = importlib.util.find_spec(name)
    has_file = spec is not None and spec.has_location and name.partition(".")[0] not in PACKAGES
    return Path(str(spec.origin)) if spec is not None and has_file else None


def parse_spec(spec: Spec) -> tuple[str, Tree]:
    """`lora,r=8,targets=[q,v]` or `{name: lora, r: 8, targets: [q, v]}` as (name, options).

    Raises: UserError for an option without `=`, a value that is not YAML, or a mapping without a name.
    """
    if isinstance(spec, dict):
        options = {str(key).replace("-", "_"): value for key, value in spec.items()}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UserError(f"a plug-in written as a mapping needs a 'name', got {spec}")
        return name, options
    name, *pairs = _split(spec)
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"'{spec}': got '{pair}', expected option=value after the name")
        options[key.strip().replace("-", "_")] = _value(spec, value)
    return name.strip(), options


def split_weight(spec: str) -> tuple[float, str]:
    """`0.7*learned,model=M` as (0.7, `learned,model=M`); the default weight is 1.

    Raises: UserError for a weight that is not a finite number, or no source after it.
    """
    if "*" not in spec.split(",")[0]:  # an option may contain *, in a regular expression
        return 1.0, spec
    text, _, source = spec.partition("*")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"reward '{spec}': got the weight '{text}', expected a number, as in 0.7*learned")
    return weight, source.strip()


def function_of(spec: str) -> tuple[str, str]:
    """The file or module and the function of a source `file.py:function`, `module:function` or `python,function=...`.
    The function is empty if the spec names none."""
    name, options = parse_spec(spec)
    name = str(options["function"]) if name == "python" and "function" in options else name
    module, _, function = name.rpartition(":")
    return (name, "") if name.endswith(".py") or not module else (module, function)


def spec(name: str, **options: str) -> str:
    """The text that `parse_spec` reads as a plug-in with these options, whatever characters they have."""
    pairs = []
    for key, value in options.items():
        plain = f"{key}={value}"
        try:
            same = parse_spec(f"{name},{plain}") == (name, {key: value})
        except UserError:
            same = False
        pairs.append(plain if same else f"{key}={json.dumps(value, ensure_ascii=False)}")
    return ",".join([name, *pairs])


def _split(spec: str) -> list[str]:
    """The parts between commas that are neither in brackets nor in a quoted value."""
    closed = re.sub(r"""(?<==)("(\\.|[^"\\])*"|'[^']*')|\[[^\]]*\]|{[^}]*}""", lambda match: "_" * len(match[0]), spec)
    cuts = [-1, *(match.start() for match in re.finditer(",", closed)), len(spec)]
    return [spec[start + 1 : end] for start, end in itertools.pairwise(cuts)]


def _value(spec: str, text: str) -> object:
    try:
        value = from_yaml(text)
        # as it is written where that differs: 0625 and 1.10 may be names, and are numbers to pydantic too
        return text.strip() if type(value) in (int, float) and str(value) != text.strip() else value
    except (yaml.YAMLError, ValueError):
        raise UserError(f"'{spec}': got '{text}', expected a value such as 8, 0.5, true, text or [a, b]") from None


def build(folder: str, spec: Spec, *args: object) -> Any:
    """`module.build(Config(**options), *args)` of the plug-in that `spec` names.

    Raises: UserError on an unknown name, an unknown or bad option, or a file without `Config` and such a `build`.
    """
    return build_with(folder, parse_spec(spec)[0], options(folder, spec), *args)


def build_with(folder: str, name: str, config: object, *args: object) -> Any:
    """The same with options that have been read already."""
    module = find(folder, name)
    _require_callable(module, "build", ["config", *(type(arg).__name__ for arg in args)], name)
    return module.build(config, *args)


def options(folder: str, spec: Spec) -> Any:
    """The `Config` of the plug-in that `spec` names, with the options in `spec`.

    Raises: UserError on an unknown name, an unknown or bad option, or a file without `Config` and `build`.
    """
    name, values = parse_spec(spec)
    return validate(find(folder, name).Config, values, name if name.endswith(".py") else f"{folder}.{name}")


def conforming(plugin: Plugin, contract: type, source: str) -> Plugin:
    """The plug-in, after a check that it has every member of the Protocol `contract`. source: its name or file.

    The methods of a contract are required. Its other members are optional: a missing one has the contract's default, in
    an object around the plug-in, which stays as it is.
    Raises: UserError that names a missing member, or one with other arguments than the contract's.
    """
    optional, missing = get_type_hints(contract), dict[str, Any]()
    for name, method in vars(contract).items():
        if name not in optional and inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
            _require_callable(plugin, name, list(inspect.signature(method).parameters)[1:], source)
    for name, hint in optional.items():
        if not hasattr(plugin, name):
            missing[name] = vars(contract)[name]
        elif (arguments := _arguments(hint)) is not None and getattr(plugin, name) is not None:
            _require_callable(plugin, name, arguments, source)
    return cast(Plugin, _WithDefaults(plugin, missing)) if missing else plugin


class _WithDefaults:
    """A plug-in with the optional members that it lacks."""

    def __init__(self, plugin: Any, members: Tree) -> None:
        self._plugin = plugin
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:  # for names that are not found here
        return getattr(vars(self)["_plugin"], name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._plugin(*arguments, **named)


def _arguments(hint: object) -> list[str] | None:
    """The types of the arguments of `Callable[[...], ...]` or `Callable[[...], ...] | None`; None for another hint."""
    functions = [part for part in (hint, *get_args(hint)) if get_origin(part) is Callable]
    types = get_args(functions[0])[0] if functions else []
    return [
        argument_type.__name__ if isinstance(argument_type, type) else inspect.formatannotation(argument_type)
        for argument_type in types
    ] or None


def _require_callable(plugin: object, name: str, arguments: list[str], source: str) -> None:
    kind, expected = type(plugin).__name__, f"expected {name}({', '.join(arguments)})"
    is_module = isinstance(plugin, ModuleType)
    owner = "" if is_module else f"build returned a value of type {kind}, which "
    member = plugin if name == "__call__" else getattr(plugin, name, None)
    if not callable(member):
        raise UserError(f"{source}: {owner}has no function {name}; {expected}")
    try:
        signature = inspect.signature(member)
    except ValueError:  # a function in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise UserError(f"{source}: {'' if is_module else f'{kind}: '}got {name}{signature}, {expected}") from None


class CatchUserCode:
    """A context that catches an exception of the user's code and stores it in `error`.

    It catches sys.exit too, which would end the stage without a word. It does not catch a UserError, which has its
    message already, an out-of-memory error, or any other exception that is not an Exception, such as Ctrl-C.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, UserError) or not (isinstance(error, Exception) or type(error) is SystemExit):
            return False
        if errors.is_out_of_memory(error):
            return False
        self.error = error
        return True


def call(file: str, name: str, function: Callable[..., T], *args: object) -> T:
    """The result of the function `name` of the user's `file`. Raises: UserError that names the line of an exception."""
    with CatchUserCode() as caught:
        return function(*args)
    assert caught.error is not None
    raise UserError(f"{file}: {name}: {error_location(caught.error)}") from caught.error


def error_location(error: BaseException) -> str:
    """`my_reward.py:7: in score: KeyError: 'x'`, with the innermost line that is neither in a library nor in the file
    that called the user's code and caught the error."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame
        for frame in frames
        if frame.filename != frames[0].filename
        and not re.search("site-packages|/lib/python|^<frozen importlib", frame.filename)
    ]
    message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if not user_frames:
        return message
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}: in {user_frames[-1].name}: {message}"
