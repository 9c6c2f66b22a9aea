"""Display of tokenised rows: the tokens of the loss in colour, lengths, and the outcome of every row."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.dataset import PhaseData, PromptDataset
from data.prepare.encode import Demonstration, Item, Preference, Recipe, Spans
from data.prepare.report import count_outcomes, locations
from rlhf.maths.intervals import power
from rlhf.pages.page import visible
from rlhf.text.dialogues import Template

PERCENTILES = (5, 50, 95, 100)
SHOWN_LOCATIONS = 5
"""dropped rows that are named, of each reason"""
CONTEXT, LEARNED, TITLE = "cyan", "green", "dim"
MARKS = ("⟦", "⟧")
"""around the tokens of the loss"""


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """Consecutive tokens that are all learned, or all not."""

    text: str
    learned: bool


def split_segments(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], spans: Spans) -> list[TokenSegment]:
    """The text of `ids`, split where the loss begins and ends.

    A segment is what its tokens add to the text before them; so the space that tokenizers drop at the beginning of a
    text is not lost.
    """
    flags = [any(start <= position < end for start, end in spans) for position in range(len(ids))]
    segments, text, start = [], "", 0
    for learned, group in groupby(flags):
        end = start + sum(1 for _ in group)
        longer = _decode(tokenizer, ids[:end])
        added = longer[len(text) :] if longer.startswith(text) else _decode(tokenizer, ids[start:end])
        segments.append(TokenSegment(added, learned))
        text, start = longer, end
    return segments


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def make_console(stream: TextIO) -> Console:
    """A console that writes to `stream`, 120 columns wide if it is not a terminal. Texts are no markup."""
    width = None if stream.isatty() else 120
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def item_blocks(tokenizer: PreTrainedTokenizerBase, title: str, item: Item) -> Iterator[tuple[str, list[TokenSegment]]]:
    """(title, segments) of each part of a row: a pair has three, prompt, chosen and rejected; other rows one."""
    if isinstance(item, Preference):
        start = item.prompt_length
        chosen, rejected = (
            split_segments(tokenizer, ids, ((start, len(ids)),)) for ids in (item.chosen, item.rejected)
        )
        margin = "" if item.margin is None else f", margin {item.margin:g}"
        yield f"{title}: prompt, {start} tokens", [segment for segment in chosen if not segment.learned]
        yield f"chosen, {len(item.chosen) - start} tokens{margin}", [each for each in chosen if each.learned]
        yield f"rejected, {len(item.rejected) - start} tokens", [each for each in rejected if each.learned]
        return
    spans = item.spans if isinstance(item, Demonstration) else ()
    learned = sum(end - start for start, end in spans)
    yield f"{title}: {len(item.ids)} tokens, {learned} learned", split_segments(tokenizer, item.ids, spans)


class Screen:
    """Prints the data of a phase. Brackets mark the tokens of the loss, colours too where the terminal has them."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self._console, self._tokenizer = console, tokenizer

    def show(self, opened: PhaseData, recipe: Recipe, rows: int) -> None:
        """Print the first `rows` training rows and the statistics."""
        train = opened.train
        unit = "contexts" if recipe.objective == "text" else "rows"
        self._print(f"{recipe.phase}: {len(train):,} {unit} to train on, {len(opened.evaluation):,} held out")
        if recipe.phase == "ppo" and len(opened.evaluation):
            self._print(f"{recipe.phase}: {power(len(opened.evaluation))}")
        if recipe.phase != "ppo" and recipe.objective != "text":
            before, after = Template(self._tokenizer).frame
            written = f"the template writes {before!r} before a plain answer and {after!r} after it"
            self._print(f"{recipe.phase}: {written}")
        if rows:
            self._print(self._style([TokenSegment("context ", False), TokenSegment("learned", True)]))
        for number, item in enumerate(train[:rows], start=1):
            title = f"{recipe.phase} {unit.removesuffix('s')} {number}"
            for block_title, segments in item_blocks(self._tokenizer, title, item):
                self._print(f"\n{block_title}", TITLE)
                self._print(self._style(segments))
        for table in (_length_table(lengths(train, recipe)), _outcome_table(opened), _source_table(opened)):
            self._print("")
            self._console.print(table)
        repeated = {reason: counted["locations"] for reason, counted in opened.report["repeated"].items()}
        for reason, shown in (locations(opened.report) | repeated).items():
            more = ", ..." if len(shown) > SHOWN_LOCATIONS else ""
            self._print(visible(f"{reason}: {', '.join(shown[:SHOWN_LOCATIONS])}{more}"))
        self._print("")

    def _print(self, text: str | Text, style: str = "") -> None:
        self._console.print(Text(text, style) if isinstance(text, str) else text, soft_wrap=True)

    def _style(self, segments: Iterable[TokenSegment]) -> Text:
        styled = Text()
        for segment in segments:
            styled.append(MARKS[0] * segment.learned)
            styled.append(visible(segment.text), LEARNED if segment.learned else CONTEXT)
            styled.append(MARKS[1] * segment.learned)
        return styled


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def lengths(train: PromptDataset, recipe: Recipe) -> dict[str, np.ndarray]:
    """Tokens [N] of the prompt, if the items separate it from the response, and of the whole row."""
    has_prompt = recipe.phase != "sft" or (recipe.objective == "response" and recipe.loss_on != "all")
    return ({"prompt": train.prompt_lengths} if has_prompt else {}) | {"whole": train.lengths}


def _percentile(tokens: np.ndarray, share: int) -> int:
    return int(np.percentile(tokens, share, method="inverted_cdf"))


def _length_table(measured: dict[str, np.ndarray]) -> Table:
    """Percentiles of tokens."""
    table = _table("tokens", *("max" if share == 100 else f"{share} %" for share in PERCENTILES))
    for name, tokens in measured.items():
        table.add_row(name, *(f"{_percentile(tokens, share):,}" for share in PERCENTILES))
    return table


def _outcome_table(opened: PhaseData) -> Table:
    """The outcomes of all rows that were read."""
    read = sum(source["rows"] for source in opened.report["sources"])
    table = _table("what became of the rows", "rows", "share")
    for fate, count in count_outcomes(opened.report).items():
        table.add_row(Text(visible(fate)), f"{count:,}", f"{count / read:.1%}")
    table.add_row("read in all", f"{read:,}", "")
    train = opened.report["train"]
    table.add_row("cut to length, of those to train on", f"{train['shortened']:,}", "")
    table.add_row("of these, part of the prompt lost", f"{train['prompts_shortened']:,}", "")
    for reason, counted in opened.report["repeated"].items():
        table.add_row(reason, f"{counted['rows']:,}", f"{counted['rows'] / read:.1%}")
    return table


def _source_table(opened: PhaseData) -> Table:
    """The contribution of each data path to training."""
    table = _table("data path", "read", "to train on", "share", "tokens", "share")
    train = opened.report["train"]
    rows, tokens = train["rows_by_source"], train["tokens_by_source"]
    for source, count, size in zip(opened.report["sources"], rows, tokens, strict=True):
        row_share, token_share = (f"{value / sum(total):.1%}" for value, total in ((count, rows), (size, tokens)))
        name = Text(visible(source["data_path"]))
        table.add_row(name, f"{source['rows']:,}", f"{count:,}", row_share, f"{size:,}", token_share)
    return table
