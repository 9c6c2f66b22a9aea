"""The mutants of a few lines, the tables beside the tool, and one run of it on a tree of two files."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

from tests.mutation.__main__ import ROOMS, ROOT, Equivalent, equivalents, owners
from tests.mutation.mutants import mutants
from tests.mutation.running import Worker

SOURCE = '''
LIMIT = 2

def kl(policy, reference, config, rows):
    """A docstring of 2 words."""
    assert len(rows) > 1, "two"
    if config.use_score_scaling:
        rows.clear()
    return clip(policy - reference, config.target_kl, bound=LIMIT, device=rows.device) + rows[LIMIT:].sum()
'''
EDITS = [
    "LIMIT = 3",
    "if not (config.use_score_scaling):",
    "pass",
    # of the last line, what stands before and after the edit left out
    "clip(config.target_kl, policy - reference, ",
    "clip(policy - reference, None, ",
    "clip(policy - reference, bound=LIMIT, device=rows.device)",
    "clip(policy - reference, config.target_kl, bound=None, ",
    "clip(policy - reference, config.target_kl, device=rows.device)",
    "policy + reference",
    "(2 * config.target_kl)",
    ") - rows",
    "rows[LIMIT - 1 : -1]",
    "rows[LIMIT:]",
]


def test_the_mutants_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(SOURCE, encoding="utf-8")
    results = list(mutants(tmp_path, "file.py"))
    for edit in EDITS:
        assert [mutant for mutant in results if edit in mutant.becomes], edit
    assert len(results) == len(EDITS), "\n".join(mutant.becomes for mutant in results)
    assert {mutant.function for mutant in results} == {"", "kl"}
    for mutant in results:
        assert mutant.line in SOURCE and mutant.becomes in mutant.source
        compile(mutant.source, "file.py", "exec")


def test_what_another_device_runs_is_left_alone(tmp_path: Path) -> None:
    source = (
        'def size(x):\n    if x.device.type == "cuda":\n        return 99\n    return 2 if x.type == "cpu" else 88\n'
    )
    (tmp_path / "file.py").write_text(source, encoding="utf-8")
    sources = [mutant.source for mutant in mutants(tmp_path, "file.py")]
    assert sources and all("99" in mutant and "88" in mutant for mutant in sources)
    assert any("return 3 if" in mutant for mutant in sources)


def test_the_tables_name_files_and_mutants_that_there_are() -> None:
    table = owners()
    for file, tests in table.items():
        assert tests and all((ROOT / path).is_file() for path in (file, *tests)), file
    every = {file: list(mutants(ROOT, file)) for file in {entry.file for entry in equivalents()}}
    for entry in equivalents():
        assert entry.file in table and any(map(entry.is_of, every[entry.file])), f"no such mutant: {entry}"
    [example] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/testing.md").read_text(encoding="utf-8"), re.DOTALL)
    assert Equivalent(**tomllib.loads(example)["mutant"][0]) in equivalents(), "the example is one of them"


def test_a_line_that_says_what_is_so_anyway_is_left_out() -> None:
    lines = tomllib.loads((ROOT / "tests/mutation/owners.toml").read_text(encoding="utf-8"))
    mirrored = {file: [f"tests/{Path(file).with_name(f'test_{Path(file).name}')}"] for file in lines}
    assert {file for file, tests in lines.items() if tests == mirrored[file]} == set()
    assert owners()["data/prepare/repetition.py"] == ["tests/data/prepare/test_repetition.py"]


def test_every_product_file_with_a_function_has_owners() -> None:
    tree = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rooms = tuple(f"{room}/" for room in ROOMS)
    files = [file for file in tree.splitlines() if file.startswith(rooms) and (ROOT / file).is_file()]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    with_functions = {
        file
        for file in files
        if any(isinstance(node, functions) for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))))
    }
    assert with_functions <= set(owners()), (
        f"add to tests/mutation/owners.toml: {', '.join(sorted(with_functions - set(owners())))}"
    )


def test_a_run_in_a_copy_of_the_tree(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    source = "def total(n):\n    s = 0\n    while n > 0:\n        s += n\n        n -= 1\n    return s\n"
    (root / "sums.py").write_text(source, encoding="utf-8")
    test = "from sums import total\n\ndef test_total():\n    assert total(3) == 6\n"
    (root / "test_sums.py").write_text(test, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    worker = Worker(root, tmp_path / "copy", modules=())
    try:
        by_edit = {mutant.becomes: mutant for mutant in mutants(root, "sums.py")}
        for edit, limit_s, outcome in (
            ("s = 1", 60, "failed"),
            ("n += 1", 2, "timed out"),
            ("while n >= 0:", 60, "passed"),  # adds 0
        ):
            assert worker.run(["test_sums.py"], limit_s, by_edit[edit])["outcome"] == outcome, edit
    finally:
        worker.close()
    assert (root / "sums.py").read_text(encoding="utf-8") == source
