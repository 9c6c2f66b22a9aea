"""The site of `make docs`: its drawing is true, its reference has every module, and it builds without a warning."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from rlhf.plugins import load_file
from tests.rules import test_architecture as rules

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs/site/mkdocs.yml"
BUILT = ("train", "rlhf.__main__", *(f"{stage}.__main__" for stage in rules.STAGES))
"""doors that start rlhf.chain and rlhf.cli, and stand with them in the drawing"""

pages = load_file(str(ROOT / "docs/site/pages.py"))


def layers() -> dict[str, float]:
    """The height of each room in the drawing; smaller is higher."""
    drawing = ElementTree.parse(ROOT / "docs/architecture.svg")
    texts = [text for text in drawing.findall(".//{*}text") if text.get("class") == "room"]
    return {str(text.text): float(text.attrib["y"]) for text in texts}


def test_the_drawing_has_every_room_and_its_arrows_point_down() -> None:
    """A room is drawn below every room that imports it, or beside it."""
    height = layers()
    drawn = {room: next(name for name in sorted(height, key=len, reverse=True) if f"{room}.".startswith(f"{name}."))
             for room in rules.ROOMS if room not in BUILT}  # fmt: skip
    assert set(drawn.values()) == height.keys()
    for module, path in rules.MODULES.items():
        for _, name in rules.imports(path):
            own, other = rules.room(module), rules.room(name)
            if own in drawn and other in drawn:
                assert height[drawn[own]] <= height[drawn[other]], f"{module} imports {name}"


def test_the_reference_has_every_public_module() -> None:
    listed = {name for page in pages.reference_pages().values() for name in re.findall(r"^::: (\S+)$", page, re.M)}
    public = {name for name in rules.MODULES if not any(part.startswith("_") for part in name.split("."))}
    empty = {name for name in public if not rules.MODULES[name].read_text(encoding="utf-8").strip()}
    assert listed == public - empty - {"train"}


def test_every_page_is_in_the_navigation() -> None:
    """As mkdocs requires with --strict, which is not installed everywhere."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    excluded = config["exclude_docs"].split()
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    expected = {page for page in there if not page.startswith(tuple(excluded))} | {*pages.OTHER_PAGES}

    def listed(entry: Any) -> list[str]:
        return [entry] if isinstance(entry, str) else [
            page for nested in (entry.values() if isinstance(entry, dict) else entry) for page in listed(nested)
        ]  # fmt: skip

    assert sorted(listed(config["nav"])) == sorted(expected)
    assert "\nmake docs\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_links_of_the_repository_become_links_of_the_site() -> None:
    text = "[a](../step1_sft/README.md#x) [b](data.md) ![c](results/s.svg) [d](../rlhf/maths/ops.py) [e](https://x.y/z)"
    expected = (
        "[a](step1_sft/README.md#x) [b](data.md) ![c](results/s.svg) [d](reference/rlhf.maths.md) [e](https://x.y/z)"
    )
    assert pages.with_site_links(text, "index.md") == expected
    assert pages.with_site_links("[a](../docs/scaling.md#disk)", "step3_ppo/README.md") == "[a](../scaling.md#disk)"


def test_links_lead_to_files_that_there_are() -> None:
    """Also in README, which is no page of the site. What a page links to is in the site, as mkdocs asks."""
    reference = pages.reference_pages()
    for page in (ROOT / "README.md", *(ROOT / path for path in pages.OTHER_PAGES), *(ROOT / "docs").rglob("*.md")):
        for target, anchor in re.findall(r"\]\(((?!\w+:)[^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            if file.suffix == ".py" and page != ROOT / "README.md":
                assert pages.page_of(str(file.resolve().relative_to(ROOT))) in reference, f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_speeds_are_those_of_the_results(page: str) -> None:
    """The ratios of the tables, and the date."""
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = {"sft": "fine-tuning", "reward": "reward model", "ppo": "PPO", "rollout": "rollout"}
    rows |= {"sft_lora": "LoRA, fine-tuning", "ppo_lora": "LoRA, PPO"}
    for name, row in rows.items():
        results = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        [cells] = re.findall(rf"^\| {row}, .*\|$", text, re.MULTILINE)
        medians = ", ".join(f"{ratio['median']:.1f}" for ratio in results["ratios"].values())
        assert f"| {medians} |" in cells and results["date"] in text, (name, medians)


WITHOUT_AMX = ("sft", "reward", "ppo", "rollout", "sft_lora", "ppo_lora")
"""the order of the table's rows"""


@pytest.mark.parametrize("name", WITHOUT_AMX)
def test_ratios_without_amx_are_those_of_the_results(name: str) -> None:
    results = json.loads((ROOT / f"benchmarks/results/{name}_no_amx.json").read_text(encoding="utf-8"))
    assert results["hardware"]["onednn_max_cpu_isa"] == "AVX512_CORE_BF16"
    medians = ", ".join(f"{ratio['median']:.1f}" for ratio in results["ratios"].values())
    rows = re.findall(r"^\| no AMX: .*\|$", (ROOT / "docs/results.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"| {medians} |" in rows[WITHOUT_AMX.index(name)]
    assert medians in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.long  # make docs builds it too
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed; make docs installs it")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference/rlhf.maths/index.html").is_file() and (tmp_path / "tutorial/index.html").is_file()
    loaded = re.compile(r'<(?:script|img)[^>]* src="https?:|<link[^>]* rel="stylesheet"[^>]* href="https?:|@import')
    for page in tmp_path.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), f"{page}: is not whole without a network"
