"""Inputs of contenders: the first rows of HH-RLHF that fit, as ids, and scalar models with a fixed head.

Both sides get the same untruncated rows, in file order. Rows that exceed the limits are left out, because each library
would truncate them differently. Peers get exactly the ids and loss masks that our stages compute.
"""

import gzip
import itertools
from pathlib import Path
from typing import Any

from benchmarks.harness import Options
from rlhf.errors import UserError

NO_TOKEN = -1
"""an id that no token has: no response ends early"""
SPLIT = {"sft": (1, 0, 0), "reward": (0, 1, 0), "ppo": (0, 0, 1)}


def require_inputs(options: Options) -> None:
    """Raises: UserError unless model and data exist."""
    if not (Path(options.model) / "config.json").is_file():
        raise UserError(f"--model {options.model}: no model there; run make smollm2, or name a directory")
    if not Path(options.data).is_file():
        raise UserError(
            f"--data {options.data}: no such file; put harmless-base/train.jsonl.gz of Anthropic/hh-rlhf there, or "
            "name it with --data"
        )


def first_rows(options: Options, phase: str, count: int, folder: Path, **more: Any) -> tuple[dict[str, Any], Any]:
    """(options of a stage that reads exactly `count` items from the file's first rows, its data).

    more: further options of the stage. Raises: UserError if fewer rows fit.
    """
    require_inputs(options)
    row_count, items = count, -1
    while items < count:
        path = folder / f"{phase}-{row_count}.jsonl"
        lines = read_lines(Path(options.data), row_count)
        path.write_text("".join(lines), encoding="utf-8")
        config = data_options(path, phase, folder, **more)
        data = _open(config, options.model, phase)
        items = len(data.train)
        if len(lines) < row_count:
            raise UserError(
                f"--data {options.data}: got {items} rows that fit, expected {count}; ask for fewer, or "
                "name a larger file"
            )
        row_count += count - items
    return config, data


def read_lines(path: Path, most: int | None = None) -> list[str]:
    """The first lines of a file of HH, which may be compressed."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return list(itertools.islice(file, most))


def data_options(path: Path, phase: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Options of a stage that trains on all rows of the file at `path`, without truncation."""
    return {
        "data_path": (f"hh_rlhf:{path}",),
        "data_split": SPLIT[phase],
        "eval_fraction": 0.0,
        "max_eval_rows": 0,
        "max_dropped": 1.0,
        "data_workers": 1,
        "data_cache": str(folder / "cache"),
        "max_length": 512,
        "output_dir": str(folder / "run"),
        **more,
    }


def _open(config: dict[str, Any], model: str, phase: str) -> Any:
    from data.config import DataOptions
    from data.dataset import Recipe, open_datasets

    values = {key: value for key, value in config.items() if key in DataOptions.model_fields}
    return open_datasets(DataOptions(**values), Recipe(phase), tokenizer(model))  # type: ignore[arg-type]


def tokenizer(model: str) -> Any:
    """The tokenizer, prepared as in every stage."""
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

    return prepare_tokenizer(load_tokenizer(model), "auto")


def demonstrations(dataset: Any) -> list[dict[str, list[int]]]:
    """The ids of every dialogue, and labels that are -100 outside of our loss mask."""
    examples = []
    for item in dataset:
        labels = [-100] * len(item.ids)
        for start, end in item.spans:
            labels[start:end] = item.ids[start:end]
        examples.append({"input_ids": list(item.ids), "labels": labels})
    return examples


def pairs(dataset: Any) -> list[dict[str, list[int]]]:
    """The ids of both sides of every pair."""
    return [{"chosen_ids": list(pair.chosen), "rejected_ids": list(pair.rejected)} for pair in dataset[:]]


def scalar_model(options: Options, folder: Path) -> str:
    """A directory with the model and a random head of one label: the critic and reward model of both sides."""
    import torch
    from transformers import AutoModelForSequenceClassification

    path = folder / "scalar"
    saved_tokenizer = tokenizer(options.model)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, dtype="bfloat16")
    model.config.pad_token_id = saved_tokenizer.pad_token_id
    with torch.no_grad():
        width = model.score.weight.shape[1]
        model.score.weight.copy_(torch.randn(1, width) * (width + 1) ** -0.5)
    model.save_pretrained(path)
    saved_tokenizer.save_pretrained(path)
    return str(path)


def weights_dtype(settings: dict[str, Any]) -> Any:
    """The dtype of a contender's weights."""
    import torch

    return torch.bfloat16 if settings["dtype"] == "bf16" else torch.float32


def padded(rows: list[list[int]], pad: int) -> tuple[Any, Any]:
    """Left-padded ids and their mask. [B, P] each"""
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
