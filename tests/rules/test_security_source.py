"""What no module of the project may do, read from the source: unpickle, run strings, leave its own folders."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlhf.config import yaml_files
from tests.rules.test_architecture import PACKAGES, PRODUCT, shown, tree

ROOT = Path(__file__).parents[2]
OTHERS = [path for name in ("tests", "benchmarks", "scripts") for path in sorted((ROOT / name).rglob("*.py"))]

# Whole modules that only serve to run what they read.
MODULES = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "telnetlib", "ftplib", "xmlrpc"}
CALLS = {
    "pickle.load", "pickle.loads", "_pickle.load", "_pickle.loads", "pandas.read_pickle",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn",
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile",
    "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all", "yaml.load_all",
    "tempfile.mktemp", "ssl._create_unverified_context", "torch.hub.load", "torch.jit.load",
    "torch.distributed.broadcast_object_list",
}  # fmt: skip
EVERY_INTERFACE = ("0.0.0.0", "::")
KEYWORDS = {"weights_only": False, "trust_remote_code": True, "shell": True, "allow_pickle": True, "verify": False}
# Where a danger is none: of the template's environment only the parser is used, as a test below shows.
MEANT = {"rlhf/text/templates.py": {"jinja2 environment"}, "rlhf/pages/page.py": {"jinja2 environment"}}


def aliases(module: ast.Module) -> dict[str, str]:
    """Whole names by the names that a module's imports give them: `np` is numpy, `loads` may be pickle.loads."""
    names = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def whole_name(node: ast.expr, known: dict[str, str]) -> str:
    first, _, rest = ast.unparse(node).partition(".")
    return ".".join(filter(None, [known.get(first, first), rest]))


def safe_loaders(module: ast.Module) -> set[str]:
    """Classes of the module that derive from YAML's safe loader."""
    names = {"yaml.SafeLoader", "yaml.CSafeLoader", "PlainLoader", "yaml_files.PlainLoader"}
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in names for base in node.bases):
            names.add(node.name)
    return names


def dangers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of each."""
    known, loaders = aliases(module), safe_loaders(module)
    for node in ast.walk(module):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((line, f"imports {name}") for name in of if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Attribute | ast.Name) and whole_name(node, known) in CALLS:
            yield line, whole_name(node, known)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.match(r"/(tmp|var/tmp|dev/shm)\b", node.value):
                yield line, f"the folder {node.value}, in which every user may write"
            if node.value in EVERY_INTERFACE:
                yield line, f"{node.value!r}, which is every interface"
        elif isinstance(node, ast.Call):
            yield from ((line, what) for what in of_call(node, whole_name(node.func, known), loaders))


def of_call(node: ast.Call, name: str, loaders: set[str]) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    for key, bad in KEYWORDS.items():
        if key in keywords and isinstance(keywords[key], ast.Constant) and keywords[key].value is bad:  # type: ignore[attr-defined]
            yield f"{key}={bad}"
    if name == "torch.load" and not (
        isinstance(weights_only := keywords.get("weights_only"), ast.Constant) and weights_only.value is True
    ):
        yield "torch.load without weights_only=True"
    if name == "yaml.load":
        loader = node.args[1] if len(node.args) > 1 else keywords.get("Loader")
        if loader is None or ast.unparse(loader) not in loaders:
            yield "yaml.load without a safe loader"
    if re.fullmatch(r"jinja2\..*(Environment|Template|from_string)", name):
        yield "jinja2 environment"
    if re.fullmatch(r"subprocess\.\w+", name) and node.args and isinstance(node.args[0], ast.JoinedStr | ast.Constant):
        yield "a command that is one string"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f, weights_only=False)",
        "import torch\ntorch.load(f)",
        "import torch as t\nt.load(f)",
        "from torch import load\nload(f)",
        "import torch\ntorch.load(f, weights_only=careful)",
        "M.from_pretrained(d, trust_remote_code=True)",
        "subprocess.run(c, shell=True)",
        "import subprocess\nsubprocess.run('rm -r x')",
        "import subprocess\nsubprocess.run(f'ssh {host}')",
        "import pickle\npickle.load(f)",
        "import pickle as p\nread = p.loads",
        "from pickle import loads\nloads(b)",
        "from pickle import loads as json_loads\njson_loads(b)",
        "import dill",
        "from joblib import load",
        "import os\nos.system(c)",
        "from os import system\nsystem(c)",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "import yaml\nyaml.load(text, Loader=yaml.FullLoader)",
        "import yaml\nclass Mine(yaml.Loader): pass\nyaml.load(text, Mine)",
        "import yaml\nyaml.unsafe_load(text)",
        "import jinja2\njinja2.Environment()",
        "import jinja2\njinja2.Template(text)",
        "from jinja2.sandbox import SandboxedEnvironment\nSandboxedEnvironment()",
        "import tempfile\ntempfile.mktemp()",
        "open('/tmp/x')",
        "np.load(f, allow_pickle=True)",
        "server.bind(('0.0.0.0', port))",
        "requests.get(url, verify=False)",
    ],
)
def test_each_danger_is_seen(source: str) -> None:
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import json\njson.load(f)",
        "model.eval()",
        "re.compile(text)",
        "import subprocess\nsubprocess.run([sys.executable, name])",
        "import yaml\nclass Mine(yaml.SafeLoader): pass\nyaml.load(text, Mine)",
        "import pickle\ntry: f()\nexcept pickle.UnpicklingError: pass",
    ],
)
def test_what_is_no_danger(source: str) -> None:
    assert not list(dangers(ast.parse(source)))


def test_the_product_does_nothing_of_it() -> None:
    for path in PRODUCT:
        violations = [(line, what) for line, what in dangers(tree(path)) if what not in MEANT.get(shown(path), ())]
        assert not violations, f"{shown(path)}: {violations}"


def test_nor_do_tests_and_benchmarks() -> None:
    """What they load they have written themselves, and still they take the safe way."""
    own = {"torch.load without weights_only=True", "a command that is one string"}  # a literal, with no word of a user
    every = {f"{address!r}, which is every interface" for address in EVERY_INTERFACE}  # where that is looked for
    for path in OTHERS:
        programs = {"exec", "compile", "__import__"} if "tests" in path.parts else set()  # of their own making
        violations = [(line, what) for line, what in dangers(tree(path)) if what not in programs | own | every]
        assert not violations, f"{shown(path)}: {violations}"


def test_pages_escape_all_values_and_render_templates_of_the_package_only() -> None:
    source = (ROOT / "rlhf/pages/page.py").read_text(encoding="utf-8")
    assert source.count("Environment(") == 1 and "autoescape=True" in source
    assert "FileSystemLoader([folder, FOLDER])" in source and source.count("_environment(") == 2
    assert "_environment(template.parent)" in source and "from_string" not in source
    templates = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.html.jinja"))]
    ours = [path.read_text(encoding="utf-8") for path in templates]
    assert len(ours) >= 3 and not any(re.search(r"\|\s*safe\b|autoescape", text) for text in ours)


def test_no_template_environment_of_strangers_templates_renders_any() -> None:
    """Templates are rendered by transformers' sandbox; ours makes a syntax tree."""
    source = (ROOT / "rlhf/text/templates.py").read_text(encoding="utf-8")
    assert not re.search(r"\.(render|from_string|compile_expression|generate)\(", source)
    assert source.count("Environment(") == 1 and "ImmutableSandboxedEnvironment(" in source


def test_the_yaml_loader_makes_plain_values() -> None:
    assert issubclass(yaml_files.PlainLoader, yaml.SafeLoader)
    for tag in ("!!python/object/apply:os.getcwd []", "!!python/name:os.system", "!!python/tuple [1]"):
        with pytest.raises(yaml.YAMLError):
            yaml.load(f"x: {tag}", yaml_files.PlainLoader)
