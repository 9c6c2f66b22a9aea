"""rlhf knows no stage: a stage declares its files, phases and options; only the chain has a list of stages."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.rules.test_architecture import PRODUCT, STAGES, module_name, room, shown, tree

# Rooms and files of rlhf that know stages: the chain; what a wheel contains; what other programs call our options; and
# a backend, which names the option that chose it.
KNOW_STAGES = ("rlhf.cli", "rlhf.chain", "rlhf/shipped.py", "rlhf/generation/vllm.py")


def fields(paths: list[Path], names: str = "") -> set[str]:
    """The fields of all classes whose names end so."""
    classes = [node for path in paths for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    body = [field for node in classes if re.search(names, node.name) for field in node.body]
    targets = [field.target for field in body if isinstance(field, ast.AnnAssign)]
    return {field.id for field in targets if isinstance(field, ast.Name)}


@cache
def options_of_stages() -> set[str]:
    """The options that only stages have. Names of one word are left out: they are words of the language, too."""
    own = [path for path in PRODUCT if room(module_name(path)) in STAGES]
    shared = [path for path in PRODUCT if path not in own]
    return {name for name in fields(own, "(Config|Options)$") - fields(shared) if "_" in name}


def words_of_stages(source: str) -> Iterator[tuple[int, str]]:
    """(line, word) of each name of a stage in the text, and of each option of one stage in strings and attributes."""
    for number, line in enumerate(source.splitlines(), start=1):
        yield from ((number, name) for name in STAGES if name in line)
    for node in ast.walk(ast.parse(source)):
        words = {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = {node.value, *(word.replace("-", "_") for word in re.findall(r"--(?:ppo\.)?([a-z-]+)", node.value))}
        yield from ((getattr(node, "lineno", 0), word) for word in words & options_of_stages())


SOURCES = ("'step1_sft'", "# as step2_reward", "c.kl_budget", "'lower --ptx-coef'", "x['whiten_advantages']")


@pytest.mark.parametrize("source", SOURCES)
def test_each_word_of_a_stage_is_seen(source: str) -> None:
    assert [*words_of_stages(source)]


def test_rlhf_knows_no_stage() -> None:
    below = [path for path in PRODUCT if (room(module_name(path)) or "").startswith("rlhf.")]
    for path in below:
        if room(module_name(path)) not in KNOW_STAGES and shown(path) not in KNOW_STAGES:
            violations = [
                f"{shown(path)}:{line}: {word}" for line, word in words_of_stages(path.read_text(encoding="utf-8"))
            ]
            assert not violations, f"{violations}: a stage declares it (rlhf/config/declaration.py)"
