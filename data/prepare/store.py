"""Items in memory-mapped Arrow files: unpadded ids, in the smallest integer type that holds the vocabulary."""

import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from data.prepare.encode import Demonstration, Encoded, Item, Preference, Prompt, RowEncoder, Truncation
from data.prepare.forked import run_forked
from data.prepare.gather import row_from_json, row_to_json
from data.read.records import Phase, Record
from rlhf.console import status
from rlhf.text.encoder import id_count
from rlhf.types import Row

PARALLEL_MIN_ROWS = 5000
"""rows below which further processes cost more time than they save"""

Columns = dict[str, list[Any]]


def features(phase: Phase, vocabulary: int) -> datasets.Features:
    """The columns of an item. `reason`: why the row was dropped, or empty."""
    ids = datasets.List(datasets.Value("uint16" if vocabulary <= 2**16 else "int32"))
    phase_columns: dict[Phase, dict[str, object]] = {
        "sft": {"ids": ids, "spans": datasets.List(datasets.Value("int32")), "weight": datasets.Value("float32")},
        "reward": {
            "prompt": ids,
            "chosen": ids,
            "rejected": ids,
            "margin": datasets.Value("float32"),
            "subset": datasets.Value("string"),
            "shorter": datasets.Value("int32"),
            "weight": datasets.Value("float32"),
        },
        "ppo": {"ids": ids, "row": datasets.Value("string"), "subset": datasets.Value("string")},
    }
    common = {"length": datasets.Value("int32"), "reason": datasets.Value("string")}
    common |= dict.fromkeys(("prompt_cut", "response_cut"), datasets.Value("bool"))
    common |= {"prompt_digest": datasets.Value("int64")}
    return datasets.Features(phase_columns[phase] | common)


def to_columns(phase: Phase, encoded: Sequence[Encoded], texts: Sequence[str]) -> Columns:
    """The columns of a batch of rows. texts: the rows as JSON, as `data.prepare.gather` wrote them."""
    columns: Columns = {name: [] for name in features(phase, 0)}
    for result, text in zip(encoded, texts, strict=True):
        if isinstance(result, str):
            item, cut, text, reason = EMPTY[phase], Truncation(), "", result
        else:
            (item, cut), reason = result, ""
        common = {"prompt_cut": cut.prompt, "response_cut": cut.response, "prompt_digest": cut.prompt_digest}
        for name, value in (_phase_columns(item, text, cut) | common | {"reason": reason}).items():
            columns[name].append(value)
    return columns


EMPTY: dict[Phase, Item] = {"sft": Demonstration((), ()), "reward": Preference((), (), 0), "ppo": Prompt((), Row(()))}
"""what is stored of a row that was dropped"""


def _phase_columns(item: Item, text: str, cut: Truncation) -> Record:
    if isinstance(item, Demonstration):
        edges = [edge for span in item.spans for edge in span]
        return {"ids": item.ids, "spans": edges, "weight": item.weight, "length": len(item.ids)}
    if isinstance(item, Prompt):
        row = row_to_json(item.row, "ppo") if cut.prompt else text
        return {"ids": item.ids, "row": row, "subset": item.subset, "length": len(item.ids)}
    start = item.prompt_length
    return {
        "prompt": item.chosen[:start],
        "chosen": item.chosen[start:],
        "rejected": item.rejected[start:],
        "margin": item.margin,
        "subset": item.subset,
        "length": max(len(item.chosen), len(item.rejected)),
        "shorter": min(len(item.chosen), len(item.rejected)),
        "weight": item.weight,
    }


def to_item(phase: Phase, columns: Record) -> Item:
    """The item of one stored row."""
    if phase == "sft":
        edges = columns["spans"]
        return Demonstration(tuple(columns["ids"]), tuple(zip(edges[::2], edges[1::2], strict=True)), columns["weight"])
    if phase == "ppo":
        return Prompt(tuple(columns["ids"]), row_from_json(columns["row"]), columns["subset"])
    prompt = columns["prompt"]
    sides = (*prompt, *columns["chosen"]), (*prompt, *columns["rejected"])
    return Preference(*sides, len(prompt), columns["margin"], columns["subset"], columns["weight"])


def encode_batch(encoder: RowEncoder, batch: Columns) -> Columns:
    """The function that `datasets.map` runs over texts of rows."""
    rows = [row_from_json(text) for text in batch["row"]]
    return to_columns(encoder.recipe.phase, encoder(rows), batch["row"])


def encode_file(rows: Path, encoder: RowEncoder, workers: int, positions: np.ndarray, batch: int) -> None:
    """Tokenise the rows at `positions` of the file `rows` into items-BATCH-*.arrow beside it, in that order.

    batch: 0 for the first call, and one more for each further call
    """
    if not len(positions):
        return
    table = datasets.Dataset.from_file(str(rows))
    if len(positions) < len(table):
        table = table.select(positions)
    if len(positions) > PARALLEL_MIN_ROWS:
        status(f"tokenising {len(positions):,} rows")
    processes = min(workers, -(-len(positions) // PARALLEL_MIN_ROWS)) if len(positions) > PARALLEL_MIN_ROWS else 1
    (
        datasets.enable_progress_bars
        if len(positions) > PARALLEL_MIN_ROWS and sys.stderr.isatty()
        else datasets.disable_progress_bars
    )()
    file = rows.with_name(f"items-{batch:03d}")
    jobs = [partial(_encode_part, table, encoder, file, part, processes) for part in range(processes)]
    gc.freeze()  # keeps pages shared with forked processes: 6 % less time, half the page faults
    try:
        jobs[0]() if processes == 1 else run_forked(jobs)
    finally:
        gc.unfreeze()


def _encode_part(table: datasets.Dataset, encoder: RowEncoder, file: Path, part: int, processes: int) -> None:
    if part > 0:
        datasets.disable_progress_bars()  # the bar of the first process stands for all
    table.shard(processes, part, contiguous=True).map(
        partial(encode_batch, encoder),
        batched=True,
        remove_columns=["row", "location"],
        features=features(encoder.recipe.phase, id_count(encoder.template.tokenizer)),
        cache_file_name=f"{file}-{part:05d}.arrow",
        new_fingerprint=f"items-{part}",
        load_from_cache_file=False,
        desc="tokenising" + (f" (1 of {processes} processes)" if processes > 1 else ""),
    )


def read_items(folder: Path) -> datasets.Dataset | None:
    """The items of the files in `folder`, memory-mapped; None if there are none."""
    parts = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("items*.arrow"))]
    return datasets.concatenate_datasets(parts) if parts else None
