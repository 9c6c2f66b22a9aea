"""Pages from templates. Every value is escaped, and the browser is told to run nothing but the page's own script."""

import base64
import functools
import hashlib
import re
import unicodedata
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from rlhf.pages.charts import Chart, draw
from rlhf.pages.numbers import cell, short
from rlhf.storage import disk

FOLDER = Path(__file__).parent
MOST_CHARACTERS = 3000
"""characters of a text that are shown"""
DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""control characters that turn the direction of the text around them"""


def render(template: Path, **values: object) -> str:
    """The page of a template that extends page.html.jinja."""
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return render_part(template, **values, style=Markup(style), script=Markup(script), policy=policy)


def render_part(template: Path, **values: object) -> str:
    """A template that is no whole page: a picture, a text. Values are escaped for HTML, unless they are Markup."""
    return _environment(template.parent).get_template(template.name).render(**values)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    """Of the templates in a folder. It compiles each of them once."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, FOLDER]), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"visible": visible, "inline": inline, "short": short, "cell": cell, "draw": draw}
    return environment


def picture(chart: Chart) -> str:
    """A figure that has points as an SVG file, in the light colours of the pages."""
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"(--\w+): light-dark\((#\w+),", style))
    rules = re.findall(r"^.*?\}$", style[style.index("svg text") :], re.MULTILINE)
    drawn = "\n".join(rule for rule in rules if re.match(r"svg |\.grid|\.line|path\.|circle\.", rule))
    plain = re.sub(r"var\((--\w+)\)", lambda name: light[name[1]], drawn)
    font = "text { font-family: system-ui, sans-serif; }"
    return render_part(FOLDER / "alone.svg.jinja", chart=chart, style=Markup(f"{font}\n{plain}"))


def write(path: Path, page: str) -> None:
    """Write a page atomically. Half of a surrogate pair, which UTF-8 does not have, is written as an escape."""
    disk.write_text(path, page.encode("utf-8", "backslashreplace").decode("utf-8"))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def visible(text: str) -> str:
    """A text with control characters as escapes such as \\x1b, and a long one without its middle."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} more characters ...] {text[-half:]}"
    return "".join(c.encode("unicode_escape").decode() if _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    if character in "\n\t":
        return False
    return character in DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs")


def inline(markdown: str) -> Markup:
    """Code spans and links of a line of Markdown; links lead nowhere in a page that stands alone, so only their text
    stays."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    parts = [
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)
