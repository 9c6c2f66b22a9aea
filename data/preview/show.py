"""What a person sees of tokenised rows: what is learned in colour, their lengths, and what became of every row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.batches import Batches
from data.build.cache import REPORT
from data.build.encode import Demonstration, Item, Preference, Spans
from data.build.making import Recipe
from data.build.report import fates
from data.dataset import Opened, PromptDataset
from data.read.records import Phase
from rlhf.errors import UserError
from rlhf.storage.disk import atomic_directory, write_json

BATCHES: dict[Phase, tuple[int, int]] = {"sft": (16, 8), "reward": (16, 8), "ppo": (64, 64)}
"""Rows of a batch, and of what is padded together, as each stage has them by default."""
PERCENTILES = (5, 50, 95, 100)
LONGEST = 1000
"""characters of a stretch that are shown"""
CONTEXT, LEARNED, SPECIAL, ASIDE = "cyan", "green", " bold", "dim"
MARKS, PLAIN_MARKS = ("⟦", "⟧"), ("[[", "]]")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of one kind."""

    text: str
    learned: bool
    special: bool


def stretches(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], spans: Spans) -> list[Stretch]:
    """The text of `ids`, cut where what is learned begins and ends, and around special tokens.

    Each has what it adds to the text before it, so the space that tokenizers drop at a text's beginning is there.
    """
    specials = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    learned = [any(start <= place < end for start, end in spans) for place in range(len(ids))]
    kinds = [(flag, i in specials) for flag, i in zip(learned, ids, strict=True)]
    found, before, start = [], "", 0
    for kind, members in groupby(kinds):
        end = start + sum(1 for _ in members)
        until = _decoded(tokenizer, ids[:end])
        adds = until[len(before) :] if until.startswith(before) else _decoded(tokenizer, ids[start:end])
        found.append(Stretch(adds, *kind))
        before, start = until, end
    return found


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def visible(text: str) -> str:
    """`text` with what a terminal would obey or not show written out, as \\x1b; without the middle of a long one."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} more characters ...] {text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def terminal(stream: TextIO) -> Console:
    """A console over `stream`; 120 wide where that is no terminal. Text is never markup."""
    width = None if stream.isatty() else 120
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


class Screen:
    """Prints what was opened for a phase. Without colours, brackets stand around what is learned."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self._console, self._tokenizer = console, tokenizer
        coloured = console.color_system is not None and not console.no_color
        plain = MARKS if console.encoding.lower().startswith("utf") else PLAIN_MARKS
        self._marks = ("", "") if coloured else plain

    def show(self, opened: Opened, recipe: Recipe, rows: int) -> None:
        """The first `rows` of the training set, and the numbers."""
        train = opened.train
        unit = "contexts" if recipe.objective == "text" else "rows"
        self._say(f"{recipe.phase}: {len(train):,} {unit} to train on, {len(opened.evaluation):,} held out")
        if rows:
            self._say(self._painted([Stretch("context ", False, False), Stretch("learned", True, False)]))
        for number, item in enumerate(train[:rows], start=1):
            self._row(f"{recipe.phase} {unit.removesuffix('s')} {number}", item)
        for table in (_lengths(train, recipe), _account(opened), _shares(opened)):
            self._say("")
            self._console.print(table)
        self._say(f"\n{_batches(train)}\n")

    def _say(self, text: str | Text, style: str = "") -> None:
        self._console.print(Text(text, style) if isinstance(text, str) else text, soft_wrap=True)

    def _row(self, title: str, item: Item) -> None:
        if isinstance(item, Preference):
            start = item.prompt_length
            chosen, rejected = (
                stretches(self._tokenizer, ids, ((start, len(ids)),)) for ids in (item.chosen, item.rejected)
            )
            margin = "" if item.margin is None else f", margin {item.margin:g}"
            self._part(f"{title}: prompt, {start} tokens", [part for part in chosen if not part.learned])
            for side, ids, parts in (("chosen", item.chosen, chosen), ("rejected", item.rejected, rejected)):
                self._part(f"{side}, {len(ids) - start} tokens{margin}", [part for part in parts if part.learned])
                margin = ""
            return
        spans = item.spans if isinstance(item, Demonstration) else ()
        learned = sum(end - start for start, end in spans)
        self._part(f"{title}: {len(item.ids)} tokens, {learned} learned", stretches(self._tokenizer, item.ids, spans))

    def _part(self, title: str, parts: Iterable[Stretch]) -> None:
        self._say(f"\n{title}", ASIDE)
        self._say(self._painted(parts))

    def _painted(self, parts: Iterable[Stretch]) -> Text:
        painted = Text()
        for learned, members in groupby(parts, key=lambda part: part.learned):
            before, after = self._marks if learned else ("", "")
            painted.append(before)
            for part in members:
                painted.append(visible(part.text), (LEARNED if learned else CONTEXT) + SPECIAL * part.special)
            painted.append(after)
        return painted


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _lengths(train: PromptDataset, recipe: Recipe) -> Table:
    """Percentiles of tokens: of the prompt, where the items tell it from the rest, and of the whole row."""
    table = _table("tokens", *("max" if share == 100 else f"{share} %" for share in PERCENTILES))
    told_apart = recipe.phase != "sft" or (recipe.objective == "response" and recipe.loss_on != "all")
    measured = {"prompt": train.prompt_lengths} if told_apart else {}
    measured["whole"] = train.lengths
    for name, lengths in measured.items():
        found = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
        table.add_row(name, *(f"{int(length):,}" for length in found))
    return table


def _account(opened: Opened) -> Table:
    """What became of every row that was read."""
    read = sum(place["rows"] for place in opened.report["places"])
    table = _table("what became of the rows", "rows", "share")
    for fate, count in fates(opened.report).items():
        table.add_row(Text(visible(fate)), f"{count:,}", f"{count / read:.1%}")
    table.add_row("read in all", f"{read:,}", "")
    train = opened.report["train"]
    table.add_row("cut to length, of those to train on", f"{train['shortened']:,}", "")
    table.add_row("of these, part of the prompt lost", f"{train['prompts_shortened']:,}", "")
    return table


def _shares(opened: Opened) -> Table:
    """What each place gives to training."""
    table = _table("place", "read", "to train on", "share", "tokens", "share")
    train = opened.report["train"]
    rows, tokens = train["rows_by_place"], train["tokens_by_place"]
    for place, count, size in zip(opened.report["places"], rows, tokens, strict=True):
        of_rows, of_tokens = (f"{part / sum(whole):.1%}" for part, whole in ((count, rows), (size, tokens)))
        name = Text(visible(place["place"]))
        table.add_row(name, f"{place['rows']:,}", f"{count:,}", of_rows, f"{size:,}", of_tokens)
    return table


def _batches(train: PromptDataset) -> str:
    """How many steps an epoch has, and what of them is padding."""
    batch_size, together = BATCHES[train.phase]
    if train.batch_elements < batch_size:
        return f"batches of {batch_size}: none, there are too few rows"
    by_length = train.phase != "ppo"  # prompts are drawn as they come
    batches = Batches(train.row_lengths if by_length else len(train), batch_size, elements=train.elements)
    share = padding_share(train.row_lengths, batches, together)
    steps = f"{batches.steps(1):,} {'iterations' if train.phase == 'ppo' else 'optimizer steps'} an epoch"
    return f"batches of {batch_size}: {steps}, {share:.1%} padding at {together} rows in one pass"


def padding_share(tokens: np.ndarray, batches: Iterable[Sequence[int]], together: int) -> float:
    """The share of padding where a batch's rows are computed `together` at a time, those of similar length. [N, k]

    k sides of a row go into as many passes, the longer ones into the first.
    """
    real = computed = 0
    for batch in batches:
        rows = tokens[batch]
        rows = rows[np.argsort(-rows.max(1), kind="stable")]
        real += int(rows.sum())
        for part in np.split(rows, range(together, len(rows), together)):
            passes = np.array_split(np.sort(part, axis=None)[::-1], part.shape[1])
            computed += sum(int(sides.max()) * sides.size for sides in passes)
    return 1 - real / computed


def export(opened: Opened, output: str) -> None:
    """Write OUTPUT/PHASE/train.parquet, evaluation.parquet and report.json, in place of those of an earlier call.

    Raises: UserError if something else is there, or nothing can be written.
    """
    folder = Path(output) / opened.train.phase
    if folder.exists() and not (folder / REPORT).is_file():
        raise UserError(f"--output {output}: {folder} is there and holds no {REPORT}; name another directory")
    try:
        with atomic_directory(folder) as staging:
            for name, side in (("train", opened.train), ("evaluation", opened.evaluation)):
                assert side.table is not None
                side.table.select(side.positions).remove_columns(["reason"]).to_parquet(staging / f"{name}.parquet")
            write_json(staging / REPORT, opened.report)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); name another directory") from None
