"""The mean of the weights of several saved models: one model that has the memory and the speed of one.

For reward models this is WARM (Rame et al. 2024, arXiv 2401.12187): runs from one initial model that differ in seed or
options are near enough for the mean of their weights to be a good model, which is more robust to noisy labels and to
shifts than each of them. Of policies it is a model soup (arXiv 2203.05482).
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf.errors import UserError
from rlhf.hub.untrusted import is_adapter
from rlhf.storage import disk

MEASURED = ("score_mean", "score_std")
"""entries of a config that were measured on one model, and are not those of the mean"""
OF_NO_WEIGHT = (*MEASURED, "_name_or_path", "transformers_version", "use_cache")
"""entries of a config in which models of one shape may differ"""
COPIED = (".json", ".jinja", ".txt", ".model")
"""suffixes of the files that are copied from the first model: its tokenizer, template and generation config"""


def require_alike(folders: Sequence[Path]) -> None:
    """Raises: UserError if a model is not whole, or their configs, tensors, shapes or dtypes differ."""
    for folder in folders:
        if is_adapter(folder):
            raise UserError(f"{folder}: got an adapter, expected a whole model; rlhf export {folder} --merge DIR")
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise UserError(f"{folder}: no model, expected a directory with config.json and *.safetensors")
    first, *others = folders
    config, tensors = _config(first), _descriptions(first)
    for other in others:
        for name in sorted({*config, *_config(other)} - {*OF_NO_WEIGHT}):
            got, expected = (c.get(name, "nothing") for c in (_config(other), config))
            if got != expected:
                raise _unlike(other, first, f"{name} {expected} in config.json", got)
        descriptions = _descriptions(other)
        for name in sorted({*tensors, *descriptions}):
            got, expected = (d.get(name, "no such tensor") for d in (descriptions, tensors))
            if got != expected:
                raise _unlike(other, first, f"tensor {name}: {expected}", got)


def _unlike(other: Path, first: Path, expected: str, got: object) -> UserError:
    return UserError(
        f"{other}: got {got}, expected {expected} as in {first}; only models of one shape can be averaged, best "
        "after training from one model"
    )


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = disk.read_json(folder / "config.json")
    return config


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    return files


def _descriptions(folder: Path) -> dict[str, str]:
    """The dtype and shape of each tensor, from the headers of the files."""
    descriptions = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no mapping)
                part = tensors.get_slice(name)
                descriptions[name] = f"{part.get_dtype()} {part.get_shape()}"
    return descriptions


def write_average(folders: Sequence[Path], out: Path) -> None:
    """Write the mean of the weights into the new directory `out`, with the other files of the first model.

    Memory holds the means of the largest file, once as tensors and once as what is written, and one tensor more: at
    most two models, however many are averaged. The sums are fp32; the mean has the dtype of the models.
    Raises: UserError for a mean that is not finite, or integer weights that differ.
    """
    files = [_files(folder) for folder in folders]
    for file in sorted({*files[0].values()}):
        with safe_open(file, framework="pt") as tensors:
            names, metadata = list(tensors.keys()), tensors.metadata()
        # Not a variable: the tensors of one file are freed before those of the next are read.
        disk.save_tensors(
            {name: mean_tensor(name, [each[name] for each in files]) for name in names}, out / file.name, metadata
        )
    for file in sorted(folders[0].iterdir()):
        if file.is_file() and file.suffix in COPIED and file.name != "config.json":
            shutil.copyfile(file, out / file.name)
    config = {name: value for name, value in _config(folders[0]).items() if name not in MEASURED}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def mean_tensor(name: str, files: Sequence[Path]) -> Tensor:
    """The mean of one tensor over the files of all models, which are read one after the other."""
    first = _read(name, files[0])
    if not first.is_floating_point():
        if not all(torch.equal(first, _read(name, file)) for file in files[1:]):
            raise UserError(
                f"{files[0].parent}: tensor {name} has integers that differ between the models, expected weights with "
                "a mean; quantised models cannot be averaged"
            )
        return first
    total = first.to(torch.float32, copy=True)
    for file in files[1:]:
        total += _read(name, file)
    mean = (total / len(files)).to(first.dtype)
    if not torch.isfinite(mean).all():
        raise UserError(
            f"tensor {name}: the mean of {len(files)} models has values that are not finite; leave out what diverged"
        )
    return mean


def _read(name: str, file: Path) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


def card(sources: Sequence[tuple[str, str | None]], task: str, tag: str) -> str:
    """The model card of the mean. sources: (name, digest of its manifest or None) of each model"""
    lines = [name if digest is None else f"{name}, manifest {digest}" for name, digest in sources]
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- {tag}\n- merge\n---\n"
        f"# The mean of {len(sources)} models\n\n"
        "Each weight is the mean of those of the models below, which have one shape (WARM, "
        "[arXiv 2401.12187](https://arxiv.org/abs/2401.12187)). Statistics of its scores were not measured.\n\n"
        + "".join(f"- {line}\n" for line in lines)
    )
