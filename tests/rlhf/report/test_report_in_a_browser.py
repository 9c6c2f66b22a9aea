"""The report in headless Chromium: nothing is loaded or run but the page itself, and what people do with it works."""

import itertools
from collections.abc import Iterator

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
