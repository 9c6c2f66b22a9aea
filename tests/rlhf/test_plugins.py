"""Plug-ins: a folder is the registry, only what is named is imported, and mistakes say what there is."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from rlhf import plugins
from rlhf.adapters import open_adapter
from rlhf.config import parser
from rlhf.config.foreign_options import METHODS
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError

MODULE = """
from rlhf.config import Config as Base

class Config(Base):
    rank: int = 4
    targets: tuple[str, ...] = ()

def build(config, *args):
    return (__name__, config, *args)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with plug-ins lora and ia3, one that cannot be imported, and a private module."""
    package = f"methods_of_{tmp_path.name}"  # a name of its own, since sys.modules outlives a test
    root = tmp_path / package
    root.mkdir()
    for name in ("__init__", "_private"):
        (root / f"{name}.py").write_text("")
    for name in ("lora", "ia3"):
        (root / f"{name}.py").write_text(MODULE)
    (root / "broken.py").write_text("raise AssertionError('imported without being named')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def user_file(tmp_path: Path, text: str, name: str = "mine.py") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def mistake(folder: str, spec: Any) -> str:
    with pytest.raises(UserError) as caught:
        plugins.build(folder, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_are_the_public_modules(folder: str) -> None:
    assert plugins.names(folder) == ["broken", "ia3", "lora"]
    assert f"{folder}.lora" not in sys.modules


def test_only_the_named_module_is_imported(folder: str) -> None:
    module, built, *rest = plugins.build(folder, "lora,rank=8", "a model", 3)
    assert (module, built.rank, rest) == (f"{folder}.lora", 8, ["a model", 3])
    assert {name for name in sys.modules if name.startswith(f"{folder}.")} == {f"{folder}.lora"}


def test_a_row_of_the_table_is_a_plug_in(folder: str, tmp_path: Path) -> None:
    """Of one shape with a module: options are checked, and its name is in the list. A module imports no table."""
    table = f"{MODULE}\nfrom types import SimpleNamespace as Row\nROWS = {{'hra': Row(Config=Config, build=build)}}\n"
    (tmp_path / folder / "_table.py").write_text(table)
    assert plugins.build(folder, "lora")[1].rank == 4
    assert f"{folder}._table" not in sys.modules
    module, built, *rest = plugins.build(folder, "hra,rank=8", "a model")
    assert (module, built.rank, rest) == (f"{folder}._table", 8, ["a model"])
    assert plugins.names(folder) == ["broken", "hra", "ia3", "lora"]
    assert f"{folder}.hra: no option 'rnk' (did you mean 'rank'?)" in mistake(folder, "hra,rnk=8")
    assert "have broken, hra, ia3, lora" in mistake(folder, "_table")


@pytest.mark.parametrize("name", ["lroa", "lora.py.txt", "../lora", "_private", ""])
def test_an_unknown_name_lists_what_there_is(folder: str, name: str) -> None:
    assert mistake(folder, name).startswith(f"no '{name}' in {folder}; have broken, ia3, lora")


def test_the_nearest_name_is_suggested(folder: str) -> None:
    for name, nearest in {"lroa": "lora", "LoRA": "lora", "IA-3": "ia3"}.items():
        assert mistake(folder, name).endswith(f" (did you mean '{nearest}'?)")


def test_a_method_that_has_another_name_here_is_answered_with_one_that_opens() -> None:
    assert not {*METHODS} & {*plugins.names("rlhf.adapters")}
    for answered in (each for each in METHODS.values() if each.startswith("--adapter ")):
        words = answered.partition(": ")[0].split()
        open_adapter(str(parser.parse(EngineOptions, words, "program", "what it does").adapter))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("lora", ("lora", {})),
        (" lora , rank = 8 ", ("lora", {"rank": 8})),
        (
            "lora,rank=8,alpha=0.5,bias=true,kind=text",
            ("lora", {"rank": 8, "alpha": 0.5, "bias": True, "kind": "text"}),
        ),
        ("lora,lora-alpha=1", ("lora", {"lora_alpha": 1})),
        ("files,subset=0625,split=1.10", ("files", {"subset": "0625", "split": "1.10"})),
        ("lora,targets=[q, v],rank=2", ("lora", {"targets": ["q", "v"], "rank": 2})),
        ("lora,text=a=b", ("lora", {"text": "a=b"})),
        ("my/lora.py,rank=2", ("my/lora.py", {"rank": 2})),
        ("lora,text='a, b',rank=2", ("lora", {"text": "a, b", "rank": 2})),
        ('lora,text="a, \\"b",rank=2', ("lora", {"text": 'a, "b', "rank": 2})),
        ("lora,text=x[^,]+,kind={a: b, c: d}", ("lora", {"text": "x[^,]+", "kind": {"a": "b", "c": "d"}})),
        ({"name": "lora"}, ("lora", {})),
        ({"name": "lora", "rank": 8, "lora-alpha": 1}, ("lora", {"rank": 8, "lora_alpha": 1})),
    ],
)
def test_both_ways_to_write_a_plug_in(spec: plugins.Spec, expected: tuple[str, dict[str, Any]]) -> None:
    before = dict(spec) if isinstance(spec, dict) else spec
    assert plugins.parse_spec(spec) == expected
    assert spec == before


@pytest.mark.parametrize(
    "path",
    ["runs/a", "runs/lr=1e-5,bs=8", "runs/try #2", "a: b", "8", "it's", 'a"b,c=d', "[a", "\u00e4", "a\\b,c", " a"],
)
def test_a_path_of_any_characters(path: str) -> None:
    assert plugins.parse_spec(plugins.spec("learned", model=path)) == ("learned", {"model": path})
    assert plugins.spec("learned", model="runs/a") == "learned,model=runs/a"


def test_a_mistake_in_the_options_is_one_line(folder: str) -> None:
    """As a file of options has them; of a command line: tests/golden/errors.txt."""
    assert "needs a 'name', got {'rank': 8}" in mistake(folder, {"rank": 8}) and mistake(folder, {"name": 3})
    assert ".lora: rank: " in (message := mistake(folder, {"name": "lora", "rank": None})) and "got None" in message


def test_a_users_file_is_a_plug_in(folder: str, tmp_path: Path) -> None:
    path = user_file(tmp_path, MODULE)
    _, built = plugins.build(folder, f"{path},rank=2")
    assert built.rank == 2
    assert mistake(folder, f"{path},rnk=2").startswith(f"{path}: no option 'rnk' (did you mean 'rank'?)")
    assert plugins.build(folder, {"name": path, "rank": 3})[1].rank == 3


def test_a_users_file_may_use_late_annotations_and_any_name(folder: str, tmp_path: Path) -> None:
    """Dataclasses and pydantic look such annotations up in the module's entry of sys.modules."""
    text = "from __future__ import annotations\nfrom dataclasses import dataclass, KW_ONLY\n" + MODULE
    text += "\n@dataclass(frozen=True, slots=True)\nclass Part:\n    x: int\n    _: KW_ONLY\n    y: str = ''\n"
    json_before = sys.modules["json"]
    plugins.build(folder, user_file(tmp_path, text, "json.py"))
    assert sys.modules["json"] is json_before


class Contract(Protocol):
    rewinds: bool = False

    def score(self, x: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Frozen:
    x: int = 3

    def score(self, x: int) -> int:
        return x * self.x

    def __call__(self, x: int, twice: bool = False) -> int:
        return x + twice * x


def test_a_default_of_the_contract_leaves_the_users_object_as_it_is() -> None:
    users = Frozen()
    plugin: Any = plugins.conforming(users, Contract, "mine.py")
    assert plugin.rewinds is False and plugin.score(2) == 6 and plugin.x == 3 and plugin(2, twice=True) == 4
    assert not hasattr(users, "rewinds") and not hasattr(plugin, "winds") and type(users) is Frozen
    assert plugins.conforming(plugin, Contract, "mine.py") is plugin


def test_mistakes_of_a_users_file(folder: str, tmp_path: Path) -> None:
    assert mistake(folder, f"{tmp_path}/absent.py") == f"{tmp_path}/absent.py: no such Python file"
    empty = user_file(tmp_path, "", "empty.py")
    assert mistake(folder, empty).startswith(f"{empty}: has no Config and no build;")
    half = user_file(tmp_path, "from rlhf.config import Config", "half.py")
    assert mistake(folder, half).startswith(f"{half}: has no build;")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(:", "SyntaxError: invalid syntax ({name}, line 1)"),
        ("import json\nimport nope_zzz\n", "{path}:2: in <module>: ModuleNotFoundError: No module named 'nope_zzz'"),
        (
            "from beside.inner import x\n",
            "{path}:1: in <module>: ModuleNotFoundError: No module named 'beside'; expected an absolute import, and "
            "PYTHONPATH={path.parent} before the command",
        ),
        (
            "from .beside import x\n",
            "{path}:1: in <module>: ModuleNotFoundError: No module named '{path.parent}/reward'; expected an absolute "
            "import, and PYTHONPATH={path.parent} before the command",
        ),
        ("def f():\n    return {}['x']\nf()\n", "{path}:2: in f: KeyError: 'x'"),
        ("import sys\nsys.exit(3)\n", "{path}:2: in <module>: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(source)
    (tmp_path / "beside.py").touch()
    with pytest.raises(UserError) as caught:
        plugins.load_file(str(file))
    assert str(caught.value) == f"{file}: cannot be imported: " + message.format(path=file, name=file.name)
    assert caught.value.__cause__ is not None and str(file) not in sys.modules
