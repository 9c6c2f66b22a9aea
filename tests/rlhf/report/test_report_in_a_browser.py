"""The report in headless Chromium: nothing is loaded or run but the page itself, and what people do with it works."""

import base64
import itertools
import re
import struct
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from rlhf.chain import report
from tests.support import recorded_runs
from tests.support.browser import CHROMIUM, Page, open_browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)"),
]
SAMPLES = 30


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = [*recorded_runs.HOSTILE, *(f"answer {i}" for i in range(SAMPLES - len(recorded_runs.HOSTILE)))]
    out = recorded_runs.run(tmp_path_factory.mktemp("run") / "out", responses=texts)
    return report.write(report.ReportConfig(runs=(str(out),))).resolve().as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, url: str) -> Page:
    browser.media(prefers_color_scheme="light")
    browser.resize(1280)
    browser.open(url)
    browser.value("localStorage.clear()")
    return browser


def test_nothing_is_loaded_and_nothing_complains(page: Page, url: str) -> None:
    assert page.requests() == [url]
    assert page.complaints() == []
    assert page.value("document.title") == "out: report"
    injected = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
    page.value(f"(() => {{ {injected} }})()")
    assert page.value("window.ran") is None and page.complaints()  # the policy refuses what is not the page's own
    page.value("fetch('https://example.org').catch(() => 0)")
    assert page.requests() == [url]


def shown(page: Page, cell: int) -> list[str]:
    rows = "[...document.querySelectorAll('.samples tbody tr')].filter((row) => !row.hidden)"
    return list(page.value(f"{rows}.map((row) => row.cells[{cell}].dataset.value ?? row.cells[{cell}].textContent)"))


def test_samples_are_sorted_searched_and_shown_in_portions(page: Page) -> None:
    gains = [*map(float, shown(page, 3))]
    assert len(gains) == 20 and gains == sorted(gains, reverse=True)
    head = ".samples thead th:nth-child(4)"
    page.value(f"document.querySelector('{head} button').click()")
    gains = [*map(float, shown(page, 3))]
    assert gains == sorted(gains) and page.value(f"document.querySelector('{head}').ariaSort") == "ascending"
    page.value("document.querySelector('button.more').click()")
    assert len(shown(page, 3)) == SAMPLES and page.value("document.querySelector('button.more').hidden")
    page.value("document.getElementById('search').focus()")
    page.call("Input.insertText", text="\u05e2\u05d5\u05dc\u05dd")
    assert [text.strip() for text in shown(page, 2)] == ["\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd"]
    assert page.value("document.querySelector('.tools output').textContent") == "1 of 1 shown"


def test_light_dark_and_print(page: Page, url: str) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.value(paper) == "rgb(255, 255, 255)"
    page.value("document.getElementById('theme').click()")
    assert (
        page.value(paper) == "rgb(21, 23, 26)" and page.value("document.getElementById('theme').textContent") == "Light"
    )
    page.open(url)
    assert page.value(paper) == "rgb(21, 23, 26)"  # the choice is kept
    page.media("print")
    assert page.value(paper) == "rgb(255, 255, 255)"
    assert page.value("getComputedStyle(document.querySelector('.bar')).display") == "none"
    page.value("localStorage.clear()")
    page.media(prefers_color_scheme="dark")
    page.open(url)
    assert page.value(paper) == "rgb(21, 23, 26)"


SAVED = """(() => new Promise((done) => {
  const create = URL.createObjectURL;
  URL.createObjectURL = (blob) => {
    blob.arrayBuffer().then((b) => done([blob.type, [...new Uint8Array(b)]]));
    return create(blob);
  };
  document.querySelector('figure.chart .take[aria-label^="Save as KIND"]').click();
}))()"""
"""the file that the button of the first figure saves"""


def test_a_figure_is_saved_for_a_paper(page: Page) -> None:
    """From the dark page: white ground, light colours, 8 pt letters; the picture has 600 dots an inch."""
    page.value("document.getElementById('theme').click()")
    kind, content = page.value(SAVED.replace("KIND", "SVG"))
    tree = ElementTree.fromstring(bytes(content).decode())
    width, height = map(float, tree.attrib["viewBox"].split()[2:])
    points = float(tree.attrib["width"].removesuffix("pt"))
    assert kind == "image/svg+xml" and points / width == pytest.approx(252 / 380, rel=1e-3)
    letters = [text for text in tree.iter() if text.tag.endswith("text")]
    assert letters and all(float(t.attrib["font-size"]) * points / width == pytest.approx(8, rel=1e-3) for t in letters)
    colours = {part.attrib.get(name) for part in tree.iter() for name in ("fill", "stroke")}
    assert tree[0].attrib["fill"] == "#fff" and "rgb(31, 95, 191)" in colours and "rgb(127, 176, 255)" not in colours
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    kind, content = page.value(SAVED.replace("KIND", "PNG"))
    size = struct.unpack(">II", bytes(content[16:24]))  # of the header
    assert kind == "image/png" and size == (round(points / 72 * 600), round(height / width * points / 72 * 600))
    assert page.complaints() == []


def test_a_table_is_copied(page: Page) -> None:
    copied = "(f) => f(document.querySelector('table.results')).split('\\n')"
    markdown = page.value(f"({copied})(asMarkdown)")
    assert markdown[:2] == [
        "| number | before | after | mean gain | higher, equal, lower |", "|---|---:|---:|---:|---|",
    ]  # fmt: skip
    assert markdown[2] == "| step3_ppo |  |  |  |  |" and markdown[3].startswith("| judge | ")
    assert all(line.count("|") == 6 for line in markdown[:-1])
    latex = page.value(f"({copied})(asLatex)")
    assert latex[:4] == [
        "\\begin{tabular}{lrrrl}", "\\toprule", "number & before & after & mean gain & higher, equal, lower \\\\",
        "\\midrule",
    ]  # fmt: skip
    assert latex[4] == "\\multicolumn{5}{l}{step3\\_ppo} \\\\" and "$\\pm$" in latex[5]
    assert all(line.count("&") == 4 for line in latex[5:10] if "multicolumn" not in line)


def test_it_prints_on_three_pages(page: Page) -> None:
    printed = base64.b64decode(page.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 3


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_a_page_is_as_wide_as_its_window(page: Page, width: int) -> None:
    page.resize(width)
    assert page.value("document.documentElement.scrollWidth") == width


def test_the_page_can_be_read_aloud_and_reached_by_keys(page: Page) -> None:
    """Headers have a scope, pictures, inputs and tables a name, headings their order; the first key skips the menu."""
    assert page.value("document.querySelectorAll('th:not([scope])').length") == 0
    assert page.value("document.querySelectorAll('svg[role=img]:not([aria-label])').length") == 0
    assert page.value("[...document.querySelectorAll('table')].every((table) => table.caption)")
    assert page.value("[...document.querySelectorAll('input')].every((i) => i.labels.length === 1)")
    levels = page.value("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
