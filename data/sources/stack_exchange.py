"""Questions and voted answers of Stack Exchange: HuggingFaceH4/stack-exchange-preferences (11 million questions).

Answers are ranked by pm_score, log2 of the votes with one more for the accepted answer (arXiv 2112.00861): the best is
the demonstration, each pair of different rating a preference. Of more than `max_responses` answers, evenly spaced ones
of the ranking are used, including the best and the worst. HTML becomes plain text: paragraphs, lists, and code between
backticks. Use `streaming` on the hub. Split: train.
"""

import html
import re
from functools import partial
from html.parser import HTMLParser

from pydantic import Field

from data.read.columns import read_number, read_structs, select_columns, user_prompt
from data.read.paths import TableConfig, open_path
from data.read.records import Record, Unusable, read_text
from data.read.table import Ranked, Table
from rlhf.errors import UserError

HUB_IDS = ("HuggingFaceH4/stack-exchange-preferences",)
BLOCKS = (
    "p", "div", "blockquote", "ul", "ol", "li", "dl", "dt", "dd", "table", "tr", "hr",
    "h1", "h2", "h3", "h4", "h5", "h6",
)  # fmt: skip


class Config(TableConfig):
    """How many answers are used."""

    max_responses: int = Field(10, ge=2)
    """maximal number of answers to one question; 10 give up to 45 pairs"""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, partial(parse, max_responses=config.max_responses))


def parse(record: Record, location: str, max_responses: int) -> Ranked:
    """Raises: UserError, Unusable."""
    prompt = html_to_text(read_text(record, "question", location), f"{location}: question")
    answers = [
        (read_text(answer, "text", item_location), read_number(answer, "pm_score", item_location), item_location)
        for item_location, answer in read_structs(record, "answers", location)
    ]
    if not answers:
        raise Unusable("no answers")
    ranking = sorted(answers, key=lambda answer: -answer[1])
    count = min(len(ranking), max_responses)
    spread = [ranking[round(i * (len(ranking) - 1) / max(count - 1, 1))] for i in range(count)]
    responses = tuple(
        (html_to_text(answer, f"{item_location}: text"), score) for answer, score, item_location in spread
    )
    return Ranked(user_prompt(prompt), responses, prompt, select_columns(record, "qid"))


def html_to_text(source: str, location: str = "") -> str:
    """The text of HTML: a blank line between paragraphs, `- ` before list items, `code` and ``` blocks.

    Raises: UserError if Python's parser cannot read it.
    """
    if "<" not in source:
        return html.unescape(source).strip()
    reader = _HtmlReader()
    try:
        reader.feed(source)
        reader.close()
    except AssertionError as error:  # html.parser raises it for an unknown declaration
        raise UserError(f"{location}: got HTML that cannot be read: {error}") from None
    return reader.text()


class _HtmlReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.parts: list[str] = []
        self.in_code_block = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "pre":
            self._end_block()
            self.in_code_block = True
        elif tag == "code" and not self.in_code_block:
            self.parts.append("`")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in BLOCKS:
            self._end_block()
            self.parts += ["- "] if tag == "li" else []

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre" or tag in BLOCKS:
            self._end_block()
        elif tag == "code" and not self.in_code_block:
            self.parts.append("`")

    def handle_data(self, data: str) -> None:
        self.parts.append(data if self.in_code_block else re.sub(r"[ \t\n\r\f]+", " ", data))

    def text(self) -> str:
        self._end_block()
        return "\n\n".join(self.blocks)

    def _end_block(self) -> None:
        text = "".join(self.parts)
        if self.in_code_block:
            block = "```\n{}\n```".format(text.strip("\n"))
        else:
            block = re.sub(r" *\n *", "\n", re.sub(r" +", " ", text)).strip(" \n")
            if block == "-":  # the paragraph inside a list item
                return
        self.in_code_block = False
        self.parts = []
        self.blocks += [block] if block else []
