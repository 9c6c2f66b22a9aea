"""Texts end to end in contexts of full length, for continued pretraining (GPT-3, arXiv 2005.14165, section 2.2).

Attention crosses from a text to the next one of its context, as in GPT-3 (appendix B: sequences with several documents
are not masked in any special way), and so in every model: a mask of blocks would keep texts apart only in those that
take one (no state that is handed on, no positions that follow from the mask). The runs say so.
"""

from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow

from data.build.store import read_items

TEXTS_AT_ONCE = 1000
ACROSS = "texts are packed end to end: a token attends to the texts before its own in the same context too"


def pack(folder: Path, size: int) -> dict[str, int]:
    """Cut the texts of `folder` into contexts of `size` tokens, those of each side in its order; (side, contexts).

    EOS stands between texts. The last context of a side is shorter.
    """
    texts = read_items(folder)
    assert texts is not None
    schema = texts.features.arrow_schema
    counts = {}
    with pyarrow.ipc.new_stream(str(folder / "packed.arrow"), schema) as stream:
        for side in ("train", "evaluation"):
            counts[side] = 0
            for contexts in _contexts(texts, np.load(folder / f"{side}.npy"), size):
                stream.write_batch(pyarrow.RecordBatch.from_pylist([_item(ids) for ids in contexts], schema=schema))
                counts[side] += len(contexts)
    for file in folder.glob("items*.arrow"):
        file.unlink()
    (folder / "packed.arrow").rename(folder / "items.arrow")
    np.save(folder / "train.npy", np.arange(counts["train"]))
    np.save(folder / "evaluation.npy", np.arange(counts["evaluation"]) + counts["train"])
    return counts


def _contexts(texts: datasets.Dataset, index: np.ndarray, size: int) -> Iterator[list[np.ndarray]]:
    left = np.zeros(0, dtype=np.int64)
    for start in range(0, len(index), TEXTS_AT_ONCE):
        rows = texts[index[start : start + TEXTS_AT_ONCE]]["ids"]
        stream = np.concatenate([left, *map(np.asarray, rows)])
        whole = len(stream) // size * size
        yield list(stream[:whole].reshape(-1, size))
        left = stream[whole:]
    if len(left) > 1:
        yield [left]


def _item(ids: np.ndarray) -> dict[str, object]:
    every = {"length": len(ids), "prompt_cut": False, "response_cut": False, "reason": ""}
    return {"ids": ids.tolist(), "spans": [1, len(ids)]} | every
