"""Items in memory-mapped Arrow files: unpadded ids, as small as the vocabulary allows, read without copying."""

import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from data.build.cut import Cut
from data.build.encode import Demonstration, Encoded, Item, Preference, Prompt, RowEncoder
from data.build.forked import run_forked
from data.build.gather import from_text, to_text
from data.read.records import Phase
from rlhf.console import status
from rlhf.text.encoder import id_count

SMALL = 5000
"""rows below which more processes cost more than they save"""

Columns = dict[str, list[Any]]


def features(phase: Phase, vocabulary: int) -> datasets.Features:
    """The columns of an item. `reason`: why a row was dropped, else empty."""
    ids = datasets.List(datasets.Value("uint16" if vocabulary <= 2**16 else "int32"))
    own: dict[Phase, dict[str, Any]] = {
        "sft": {"ids": ids, "spans": datasets.List(datasets.Value("int32"))},
        "reward": {
            "prompt": ids,
            "chosen": ids,
            "rejected": ids,
            "margin": datasets.Value("float32"),
            "shorter": datasets.Value("int32"),
        },
        "ppo": {"ids": ids, "row": datasets.Value("string")},
    }
    every = {"length": datasets.Value("int32"), "reason": datasets.Value("string")}
    every |= dict.fromkeys(("prompt_cut", "response_cut"), datasets.Value("bool"))
    return datasets.Features(own[phase] | every)


def to_columns(phase: Phase, encoded: Sequence[Encoded], texts: Sequence[str]) -> Columns:
    """The columns of some rows; `texts` are the rows as written by `data.build.gather`."""
    columns: Columns = {name: [] for name in features(phase, 0)}
    for result, text in zip(encoded, texts, strict=True):
        item, cut, reason = (None, Cut(), result) if isinstance(result, str) else (*result, "")
        own = _EMPTY[phase] if item is None else _own_columns(item, text, cut)
        every = {"prompt_cut": cut.prompt, "response_cut": cut.response, "reason": reason}
        for name, value in (own | every).items():
            columns[name].append(value)
    return columns


_EMPTY: dict[Phase, dict[str, Any]] = {
    "sft": {"ids": [], "spans": [], "length": 0},
    "reward": {"prompt": [], "chosen": [], "rejected": [], "margin": None, "length": 0, "shorter": 0},
    "ppo": {"ids": [], "row": "", "length": 0},
}


def _own_columns(item: Item, text: str, cut: Cut) -> dict[str, Any]:
    if isinstance(item, Demonstration):
        return {"ids": item.ids, "spans": [edge for span in item.spans for edge in span], "length": len(item.ids)}
    if isinstance(item, Prompt):
        return {"ids": item.ids, "row": to_text(item.row, "ppo") if cut.prompt else text, "length": len(item.ids)}
    start = item.prompt_length
    return {
        "prompt": item.chosen[:start],
        "chosen": item.chosen[start:],
        "rejected": item.rejected[start:],
        "margin": item.margin,
        "length": max(len(item.chosen), len(item.rejected)),
        "shorter": min(len(item.chosen), len(item.rejected)),
    }


def to_item(phase: Phase, columns: dict[str, Any]) -> Item:
    """The item of one stored row."""
    if phase == "sft":
        edges = columns["spans"]
        return Demonstration(tuple(columns["ids"]), tuple(zip(edges[::2], edges[1::2], strict=True)))
    if phase == "ppo":
        return Prompt(tuple(columns["ids"]), from_text(columns["row"]))
    prompt = columns["prompt"]
    sides = (*prompt, *columns["chosen"]), (*prompt, *columns["rejected"])
    return Preference(*sides, len(prompt), columns["margin"])


class EncodeBatch:
    """The function that `datasets.map` runs over texts of rows."""

    def __init__(self, encoder: RowEncoder) -> None:
        self._encoder = encoder

    def __call__(self, batch: Columns) -> Columns:
        rows = [from_text(text) for text in batch["row"]]
        return to_columns(self._encoder.phase, self._encoder(rows), batch["row"])


def encode_file(
    rows: Path, encoder: RowEncoder, folder: Path, workers: int, picked: np.ndarray, batch: int
) -> np.ndarray:
    """Tokenise the rows at positions `picked` of the file `rows` into `folder`/items-BATCH-*.arrow, in their order.

    batch: 0 for the first call, and one more for each that adds rows. Returns which can be used, bool [N].
    """
    if not len(picked):
        return np.zeros(0, dtype=bool)
    table = datasets.Dataset.from_file(str(rows))
    if len(picked) < len(table):
        table = table.select(picked)
    if len(picked) > SMALL:
        status(f"tokenising {len(picked):,} rows")
    count = min(workers, -(-len(picked) // SMALL)) if len(picked) > SMALL else 1
    (datasets.enable_progress_bars if len(picked) > SMALL and sys.stderr.isatty() else datasets.disable_progress_bars)()
    name = f"items-{batch:03d}"
    jobs = [partial(_encode_part, table, encoder, folder / name, part, count) for part in range(count)]
    gc.freeze()  # what forked processes share with this one they then need not copy: 6 % less time, half the faults
    try:
        jobs[0]() if count == 1 else run_forked(jobs)
    finally:
        gc.unfreeze()
    items = read_items(folder, name)
    assert items is not None
    return np.array(items.data.column("reason"), object) == ""


def _encode_part(table: datasets.Dataset, encoder: RowEncoder, file: Path, part: int, count: int) -> None:
    if part > 0:
        datasets.disable_progress_bars()  # that of the first one speaks for all
    table.shard(count, part, contiguous=True).map(
        EncodeBatch(encoder),
        batched=True,
        remove_columns=["row"],
        features=features(encoder.phase, id_count(encoder.template.tokenizer)),
        cache_file_name=f"{file}-{part:05d}.arrow",
        new_fingerprint=f"items-{part}",
        load_from_cache_file=False,
        desc="tokenising" + (f" (1 of {count} processes)" if count > 1 else ""),
    )


def read_items(folder: Path, name: str = "items") -> datasets.Dataset | None:
    """All items of `folder`, or of its files that begin with `name`, mapped into memory; None if there is none."""
    parts = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob(f"{name}*.arrow"))]
    return datasets.concatenate_datasets(parts) if parts else None
