"""What mkdocs needs beside docs/*.md: pages of the repository's other folders, and an API reference.

The reference has one page for each package, with every public module in it, which mkdocstrings fills from docstrings.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("rlhf", "data", "step1_sft", "step2_reward", "step3_ppo")
OTHER_PAGES = (
    "step1_sft/README.md", "step2_reward/README.md", "step3_ppo/README.md", "CONTRIBUTING.md", "SECURITY.md",
    "CHANGELOG.md",
)  # fmt: skip
"""pages of the site that lie outside docs/, by their paths in the repository"""


def public_modules() -> dict[str, list[str]]:
    """The public modules of each package, itself first if it is documented: `{"rlhf.maths": ["rlhf.maths.credit"]}`."""
    found: dict[str, list[str]] = {}
    for file in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        if parts[-1] == "__init__" and file.read_text(encoding="utf-8").strip():
            found.setdefault(package, []).insert(0, package)
        elif not parts[-1].startswith("_"):
            found.setdefault(package, []).append(".".join(parts))
    return found


def reference_pages() -> dict[str, str]:
    """The Markdown of the reference by the page's path in the site."""
    pages = {}
    for package, modules in sorted(public_modules().items()):
        blocks = "".join(f"\n::: {module}\n" for module in modules)
        pages[f"reference/{package}.md"] = f"# {package}\n{blocks}"
    return pages


def page_of(path: str) -> str:
    """The page of the site that shows the repository's file: `docs/data.md` is `data.md`, a module its reference."""
    if path == "README.md":
        return "index.md"
    if path.endswith(".py"):
        package = posixpath.dirname(path).replace("/", ".")
        return f"reference/{package}.md"
    return path.removeprefix("docs/")


def with_site_links(markdown: str, page: str) -> str:
    """The text of `page`, whose links name files of the repository, with links to the site's pages."""
    source = posixpath.dirname(page if page in OTHER_PAGES else f"docs/{page}")

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        shown = page_of(posixpath.normpath(posixpath.join(source, target)))
        return f"]({posixpath.relpath(shown, posixpath.dirname(page) or '.')}{anchor})"

    return re.sub(r"\]\(((?!\w+:)[^)#\s]+)(#[^)\s]*)?\)", link, markdown)


def on_config(config: Any) -> Any:
    """mkdocs: the reference at the end of the navigation."""
    config.nav = [*config.nav, {"API reference": list(reference_pages())}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: the pages that do not lie in docs/, and a wider column for code."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "wide.css", content=".md-grid { max-width: 80rem; }\n"))
    for path, text in reference_pages().items():
        files.append(File.generated(config, path, content=text))
    for path in OTHER_PAGES:
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs: links between files of the repository become links between pages."""
    path = page.file.src_uri
    return markdown if path.startswith("reference/") else with_site_links(markdown, path)
