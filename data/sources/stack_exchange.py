"""Questions and voted answers of Stack Exchange: HuggingFaceH4/stack-exchange-preferences (11 million questions).

Answers are ranked by pm_score, log2 of the votes with one more for the accepted answer (arXiv 2112.00861): the best is
the demonstration, every unequal pair a preference. Of more than `max_responses` answers those are taken that lie
evenly over the ranking, the best and the worst among them. HTML becomes plain text: paragraphs, lists, and code between
backticks. Use `streaming` on the hub. Only a split train.
"""

import html
import re
from functools import partial
from html.parser import HTMLParser

from pydantic import Field

from data.read.columns import asked, kept, number, structs
from data.read.places import TableConfig, open_place
from data.read.records import Record, Unusable, text
from data.read.table import Ranked, Table
from rlhf.errors import UserError

HUB_IDS = ("HuggingFaceH4/stack-exchange-preferences",)
BLOCKS = (
    "p", "div", "blockquote", "ul", "ol", "li", "dl", "dt", "dd", "table", "tr", "hr",
    "h1", "h2", "h3", "h4", "h5", "h6",
)  # fmt: skip


class Config(TableConfig):
    """How many answers make rows."""

    max_responses: int = Field(10, ge=2)
    """answers to one question at most: 10 make up to 45 pairs"""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, partial(parse, max_responses=config.max_responses))


def parse(record: Record, where: str, max_responses: int) -> Ranked:
    """Raises: UserError, Unusable."""
    prompt = plain(text(record, "question", where), f"{where}: question")
    answers = [
        (text(answer, "text", at), number(answer, "pm_score", at), at)
        for at, answer in structs(record, "answers", where)
    ]
    if not answers:
        raise Unusable("no answers")
    ranking = sorted(answers, key=lambda answer: -answer[1])
    count = min(len(ranking), max_responses)
    spread = [ranking[round(i * (len(ranking) - 1) / max(count - 1, 1))] for i in range(count)]
    responses = tuple((plain(words, f"{at}: text"), score) for words, score, at in spread)
    return Ranked(asked(prompt), responses, prompt, kept(record, "qid"))


def plain(source: str, where: str = "") -> str:
    """The text of HTML: a blank line between paragraphs, `- ` before list items, `code` and ``` blocks.

    Raises: UserError for what Python's parser cannot read.
    """
    if "<" not in source:
        return html.unescape(source).strip()
    reader = _Reader()
    try:
        reader.feed(source)
        reader.close()
    except AssertionError as error:  # how html.parser says that a declaration is unknown
        raise UserError(f"{where}: got HTML that cannot be read: {error}") from None
    return reader.whole()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.words: list[str] = []
        self.in_code_block = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "pre":
            self._end_block()
            self.in_code_block = True
        elif tag == "code" and not self.in_code_block:
            self.words.append("`")
        elif tag == "br":
            self.words.append("\n")
        elif tag in BLOCKS:
            self._end_block()
            self.words += ["- "] if tag == "li" else []

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre" or tag in BLOCKS:
            self._end_block()
        elif tag == "code" and not self.in_code_block:
            self.words.append("`")

    def handle_data(self, data: str) -> None:
        self.words.append(data if self.in_code_block else re.sub(r"[ \t\n\r\f]+", " ", data))

    def whole(self) -> str:
        self._end_block()
        return "\n\n".join(self.blocks)

    def _end_block(self) -> None:
        words = "".join(self.words)
        if self.in_code_block:
            block = "```\n{}\n```".format(words.strip("\n"))
        else:
            block = re.sub(r" *\n *", "\n", re.sub(r" +", " ", words)).strip(" \n")
            if block == "-":  # the paragraph inside a list item
                return
        self.in_code_block = False
        self.words = []
        self.blocks += [block] if block else []
