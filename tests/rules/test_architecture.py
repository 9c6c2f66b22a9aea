"""The rules of the house, read from the source: who may import whom, and how code reads.

A rule that stands in the way is changed here, with the reason in docs/decisions.md.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Rooms, from the top down. A room's modules import their own room and those below it; a dotted name is one module.
ROOMS = (
    "train", "rlhf.__main__", "rlhf.cli", "step1_sft.__main__", "step2_reward.__main__", "step3_ppo.__main__",
    "rlhf.chain", "step3_ppo", "step2_reward", "step1_sft", "rlhf.supervised", "rlhf.chat", "rlhf.evaluation",
    "data.preview", "data.sources", "data", "data.prepare", "data.read", "data.config",
    "rlhf.plan", "rlhf.training", "rlhf.report", "rlhf.rewards",
    "rlhf.generation", "rlhf.engine", "rlhf.adapters", "rlhf.models", "rlhf.kernels", "rlhf.roles",
    "rlhf.text", "rlhf.hub", "rlhf.pages", "rlhf.launch", "rlhf.distributed", "rlhf.storage",
    "rlhf.maths", "rlhf.types", "rlhf.console", "rlhf.plugins", "rlhf.config", "rlhf.errors",
    "rlhf.streams", "rlhf.private_folders", "rlhf.shipped",
)  # fmt: skip
STAGES = ("step1_sft", "step2_reward", "step3_ppo")
DATA_SEES = ("rlhf.pages", "rlhf.launch", "rlhf.text", "rlhf.hub", "rlhf.storage", "rlhf.maths", "rlhf.types",
             "rlhf.console", "rlhf.plugins", "rlhf.config", "rlhf.errors", "rlhf.streams", "rlhf.shipped")  # fmt: skip
# Importing these must not import torch, so that --help and a mistyped option answer at once.
TORCH_FREE = (
    "rlhf.cli", "rlhf.console", "rlhf.plugins", "rlhf.config", "rlhf.config.options", "rlhf.config.short_help",
    "rlhf.errors", "rlhf.streams", "rlhf.private_folders", "rlhf.hub.short_names",
    "rlhf.training.stage_process", "rlhf.launch.hosts", "rlhf.launch.launcher", "rlhf.launch.rank_variables",
    "rlhf.launch.supervisor", "rlhf.distributed.addresses", "rlhf.chain.options", "rlhf.chain.early", "data.config",
    "rlhf.chain.stages", "rlhf.chain.chat", "rlhf.chat.options", "step3_ppo.algorithm_options",
    "rlhf.config.declaration", "rlhf.supervised.options", "step2_reward.evaluation_options",
    *(f"{stage}.config" for stage in STAGES),
)  # fmt: skip
# Engines, their weights and optimizers, attention of ranks that share rows, where ranks meet, and the hostfile.
KNOW_DEEPSPEED = (
    "rlhf/engine/training.py", "rlhf/engine/optimizer_state.py", "rlhf/engine/frozen.py",
    "rlhf/distributed/zero3.py", "rlhf/distributed/tensor_parallel.py", "rlhf/distributed/collectives.py",
    "rlhf/launch/hosts.py", "rlhf/models/sequence_parallel.py",
)  # fmt: skip
PLUGIN_FOLDERS = ("data/sources", "rlhf/rewards", "rlhf/generation", "rlhf/adapters", "step2_reward/objectives",
                  "step3_ppo/algorithms", "rlhf/training/trackers")  # fmt: skip

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 400

# Words the project has another word for; a dataset's column keeps its name.
FORBIDDEN_WORDS = {
    "query": "prompt",
    "queries": "prompts",
    "completion": "response",
    "completions": "responses",
    "experience": "rollout",
    "experiences": "rollouts",
    "trajectory": "rollout",
    "trajectories": "rollouts",
}
WORDS_OF_COLUMNS = {"data/sources": {"completion", "completions", "query"}}
# Words that do not say what a thing is. HELD_OUT and the like are the field's words.
VAGUE_WORDS = {
    "asked", "deed", "found", "given", "heard", "kept", "look", "looked", "made", "place", "places", "said", "seen",
    "standing", "told",
}  # fmt: skip

# Calls that only make a constant, allowed at import time beside those of classes; `.name` is a method of a constant.
CONSTANT_MAKERS = {
    "partial", "product", "re.compile", "torch.device",
    "dict", "enumerate", "frozenset", "len", "list", "max", "min", "range", "set", "sorted", "sum", "tuple", "zip",
    ".format", ".is_dir", ".items", ".join", ".keys", ".split", ".values",
}  # fmt: skip
MUTATORS = {
    "append", "add", "update", "extend", "insert", "setdefault", "pop", "popitem", "remove", "discard", "clear", "sort",
}  # fmt: skip

PACKAGES, OTHERS = ("rlhf", "data", *STAGES), ("tests", "benchmarks", "scripts")
PRODUCT = [*(path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))), ROOT / "train.py"]
PRODUCT = [path for path in PRODUCT if path.is_file()]
PYTHON = [*PRODUCT, *(path for name in OTHERS for path in sorted((ROOT / name).rglob("*.py")))]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".jinja", ".sh", ""}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of a rule over all files: its failures name the file."""

    def of_rule(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            for path in paths:
                rule(path)

        return test

    return of_rule


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PRODUCT}


def imported(node: ast.AST, path: Path) -> list[str]:
    """The modules that an import statement names, as far as they can be told from attributes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    base = [*package[: len(package) - node.level + 1], node.module] if node.level else [node.module]
    start = ".".join(part for part in base if part)
    return [name if (name := f"{start}.{alias.name}") in MODULES else start for alias in node.names]


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import, those inside functions too."""
    return [
        (node.lineno, name) for node in ast.walk(tree(path)) if hasattr(node, "lineno") for name in imported(node, path)
    ]


def imported_at_once(path: Path) -> list[str]:
    """What importing the module imports: module level, class bodies and conditions, but not `if TYPE_CHECKING`."""
    names: list[str] = []
    waiting: list[ast.AST] = [*tree(path).body]
    while waiting:
        node = waiting.pop()
        names += imported(node, path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        waiting += ast.iter_child_nodes(node)
    # `import a.b` runs a/__init__.py first.
    return [".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)]


def room(module: str) -> str | None:
    """The room of a module, None if it is not the project's."""
    rooms = [name for name in ROOMS if module == name or module.startswith(f"{name}.")]
    assert rooms or module.split(".")[0] not in PACKAGES or module == "rlhf", f"{module} has no room: see ROOMS"
    return max(rooms, key=len, default=None)


# --- who may import whom


def test_every_room_has_a_module() -> None:
    assert {room(module) for module in MODULES} - {None} == {*ROOMS}


@each(PRODUCT)
def test_imports_only_point_down(path: Path) -> None:
    own = room(module_name(path))
    for line, name in imports(path):
        other = room(name)
        if own is None or other in (None, own):
            continue
        where = f"{shown(path)}:{line}: {own} imports {name}"
        assert ROOMS.index(other) > ROOMS.index(own), where
        assert not own.startswith("data") or other.startswith("data") or other in DATA_SEES, where
        assert own not in STAGES or other not in STAGES, f"{where}; stages never import each other"


def test_no_import_goes_in_a_circle() -> None:
    """Neither at import time nor hidden in functions."""
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, "imports go in a circle: " + " -> ".join([*above, module])
        if module in done:
            return
        for _, name in imports(MODULES[module]):
            # A package's __init__ may import its modules, which may import what it defines.
            if name in MODULES and not f"{module}.".startswith(f"{name}."):
                visit(name, (*above, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_source_of_torch_free_modules(module: str) -> None:
    reached, waiting = {module}, [module]
    while waiting:
        for name in imported_at_once(MODULES[waiting.pop()]):
            assert name.split(".")[0] not in ("torch", "transformers", "deepspeed", "datasets"), f"{module}: {name}"
            if name in MODULES and name not in reached:
                reached.add(name)
                waiting.append(name)


def test_stages_start_without_peft() -> None:
    """It takes two CPU seconds with bitsandbytes, and transformers' optimizers import both."""
    slow = ("peft", "bitsandbytes", "transformers.optimization", "transformers.trainer")
    for module, path in MODULES.items():
        if room(module) != "rlhf.adapters":
            assert not [name for name in imported_at_once(path) if name.startswith(slow)], module


def test_neither_torch_free_modules_nor_help_import_torch() -> None:
    help_page = "import train; train.main(['--help'])"
    program = f"import sys, {', '.join(TORCH_FREE)}; {help_page}; assert 'torch' not in sys.modules"
    assert "--ppo.kl-coef" in subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)


@each([path for path in PRODUCT if room(module_name(path)) == "rlhf.maths"])
def test_mathematics_needs_torch_and_numpy_only(path: Path) -> None:
    for line, name in imports(path):
        root = name.split(".")[0]
        assert room(name) == "rlhf.maths" or root in ("torch", "numpy") or root in sys.stdlib_module_names, (
            f"{shown(path)}:{line}: {name}"
        )
        assert not name.startswith("torch.distributed"), f"{shown(path)}:{line}: {name}"


@each([path for path in PRODUCT if shown(path) not in KNOW_DEEPSPEED])
def test_only_the_engine_knows_deepspeed(path: Path) -> None:
    for line, name in imports(path):
        assert name.split(".")[0] != "deepspeed", f"{shown(path)}:{line}: {name}"


# --- plug-ins


def plugins() -> list[Path]:
    return [p for folder in PLUGIN_FOLDERS for p in sorted((ROOT / folder).glob("*.py")) if not p.name.startswith("_")]


@each(plugins())
def test_a_plug_in_has_config_and_build(path: Path) -> None:
    body = tree(path).body
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    imported = {alias.asname for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert "Config" in classes | imported, f"{shown(path)}: has no class Config"
    assert "build" in functions, f"{shown(path)}: has no function build"


# --- how it reads


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@each(PYTHON)
def test_sizes(path: Path) -> None:
    assert path.name != "utils.py", f"{shown(path)}: name the file for what it does"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{shown(path)}: {lines} lines, at most {MAX_FILE_LINES}"
    for node in functions(path):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        where = f"{shown(path)}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
        assert lines <= MAX_FUNCTION_LINES, where


def faults(node: ast.AST) -> Iterator[str]:
    """What is wrong with one node, wherever it stands; what is dangerous: rules/test_security_source.py."""
    if isinstance(node, ast.ExceptHandler):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(kind is None or ast.unparse(kind) == "Exception" for kind in caught):
            yield "name the exceptions to catch"
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        if any(ast.unparse(kind) == "Exception" for kind in node.args):
            yield "name the exceptions to suppress"
    elif isinstance(node, ast.Name) and node.id == "NotImplementedError":
        yield "no stubs"
    elif isinstance(node, ast.Global):
        yield "no mutable module globals"


@pytest.mark.parametrize(
    "source",
    [
        "try: f()\nexcept: pass",
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept (OSError, Exception) as e: pass",
        "with contextlib.suppress(OSError, Exception): f()",
        "raise NotImplementedError",
        "def f():\n    global x",
    ],
)
def test_each_fault_is_seen(source: str) -> None:
    assert any(fault for node in ast.walk(ast.parse(source)) for fault in faults(node))


@each(PYTHON)
def test_no_broad_exceptions_stubs_or_globals(path: Path) -> None:
    for node in ast.walk(tree(path)):
        for fault in faults(node):
            assert not fault, f"{shown(path)}:{getattr(node, 'lineno', '?')}: {fault}"


@each(PYTHON)
def test_no_comment_promises_work(path: Path) -> None:
    promise, text = r"#.*\b(TODO|FIXME|XXX|HACK)\b", path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline) if re.search(promise, text) else ()
    faults = [token for token in tokens if token.type == tokenize.COMMENT and re.search(promise, token.string)]
    assert not faults, f"{shown(path)}: {faults}"


def project_texts() -> list[Path]:
    """Files people wrote, in folders the project has; what runs and tools leave behind is not among them."""
    folders = [ROOT / name for name in (*PACKAGES, *OTHERS, "configs", "docs", ".ci")]
    files = [
        *(path for path in ROOT.iterdir() if path.name != ".git"),
        *(path for folder in folders for path in folder.rglob("*")),
    ]
    return sorted(p for p in files if p.is_file() and p.suffix in TEXT_SUFFIXES and "__pycache__" not in p.parts)


@each(project_texts())
def test_no_path_of_one_machine(path: Path) -> None:
    match = re.search(r"(?<![\w.>)}/])/(?:work|root|home|Users|farm)/", path.read_text(encoding="utf-8"))
    assert match is None, f"{shown(path)}: {match}"


def makes_a_constant(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    method = f".{call.func.attr}" if isinstance(call.func, ast.Attribute) else name
    return bool({name, method} & CONSTANT_MAKERS) or re.fullmatch(r"[A-Z]\w*[a-z]\w*", name) is not None


def acts_at_import(node: ast.stmt) -> bool:
    """Whether a statement of a module does more than define."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return any(not makes_a_constant(call) for call in ast.walk(node) if isinstance(call, ast.Call))
    guard = ast.unparse(node.test) if isinstance(node, ast.If) else ""
    return guard not in ("__name__ == '__main__'", "TYPE_CHECKING")


@each(PRODUCT)
def test_importing_a_module_only_defines(path: Path) -> None:
    for node in tree(path).body:
        assert not acts_at_import(node), f"{shown(path)}:{node.lineno}: {ast.unparse(node).splitlines()[0]}"


@each(PRODUCT)
def test_constants_stay_what_they_are(path: Path) -> None:
    """A list, dict or set at module level is a constant: nothing in the module changes it."""
    nodes = [node for node in tree(path).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [t for node in nodes for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    constants = {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree(path)):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = node.func.value
        wrong = isinstance(changed, ast.Name) and changed.id in constants
        assert not wrong, f"{shown(path)}:{getattr(node, 'lineno', '?')}: changes the constant {ast.unparse(node)}"


def defined_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


@each(PRODUCT)
def test_one_word_per_thing(path: Path) -> None:
    columns = next((words for folder, words in WORDS_OF_COLUMNS.items() if shown(path).startswith(folder)), set())
    names = [*defined_names(path), (1, path.stem)]
    for line, name in names:
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name):
            better = None if word.lower() in columns else FORBIDDEN_WORDS.get(word.lower())
            assert better is None, f"{shown(path)}:{line}: {name}: the project says {better}"
            vague = (
                f"{shown(path)}:{line}: {name}: '{word}' does not say what the thing is: name it by a noun of the field"
            )
            assert word.lower() not in VAGUE_WORDS, vague
