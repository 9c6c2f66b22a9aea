"""Packing: texts are joined into contexts of full length, for continued pretraining (GPT-3, arXiv 2005.14165, 2.2).

Tokens attend to the earlier texts of their context, as in GPT-3 (appendix B: no special masking). A block mask would
separate texts only in models that support one: not with recurrent states, or positions computed from the mask. Each run
prints this as a note.
"""

from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow

from data.prepare.store import read_items

BATCH_TEXTS = 1000
CROSS_TEXT_ATTENTION = (
    "texts are packed end to end: a token attends to the texts before its own in the same context too"
)


def pack(folder: Path, size: int) -> dict[str, int]:
    """Replace the texts of `folder` by contexts of `size` tokens, in order. Returns split -> number of contexts.

    Texts are separated by EOS. The last context of a split is shorter.
    """
    texts = read_items(folder)
    if texts is None:  # no usable row
        return {"train": 0, "evaluation": 0}
    schema = texts.features.arrow_schema
    counts = {}
    with pyarrow.ipc.new_stream(str(folder / "packed.arrow"), schema) as stream:
        for split in ("train", "evaluation"):
            counts[split] = 0
            for contexts in _contexts(texts, np.load(folder / f"{split}.npy"), size):
                stream.write_batch(pyarrow.RecordBatch.from_pylist([_item(ids) for ids in contexts], schema=schema))
                counts[split] += len(contexts)
    for file in folder.glob("items*.arrow"):
        file.unlink()
    (folder / "packed.arrow").rename(folder / "items.arrow")
    np.save(folder / "train.npy", np.arange(counts["train"]))
    np.save(folder / "evaluation.npy", np.arange(counts["evaluation"]) + counts["train"])
    return counts


def _contexts(texts: datasets.Dataset, index: np.ndarray, size: int) -> Iterator[list[np.ndarray]]:
    remainder = np.zeros(0, dtype=np.int64)
    for start in range(0, len(index), BATCH_TEXTS):
        rows = texts[index[start : start + BATCH_TEXTS]]["ids"]
        stream = np.concatenate([remainder, *map(np.asarray, rows)])
        end = len(stream) // size * size
        yield list(stream[:end].reshape(-1, size))
        remainder = stream[end:]
    if len(remainder) > 1:
        yield [remainder]


def _item(ids: np.ndarray) -> dict[str, object]:
    common = {"length": len(ids), "prompt_cut": False, "response_cut": False, "reason": ""}
    return {"ids": ids.tolist(), "spans": [1, len(ids)], "weight": 1.0} | common
