"""`rlhf average MODEL MODEL ... --out DIR`: one model whose weights are the mean of those of several."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from rlhf import console
from rlhf.config import Config, parser
from rlhf.errors import UserError

NAME = "python -m rlhf average"
FOLDERS = ("actor", "model", "critic")
"""folders of a stage, of which the first that there is is averaged"""


class AverageConfig(Config):
    """The models, and where their mean goes."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """two or more: directories of finished stages, or of models, of one shape and with one tokenizer"""
    out: str | None = None
    """directory to write"""


def average(models: tuple[str, ...], out: Path) -> None:
    """Write the mean of the weights of several models.

    Raises: UserError for models that cannot be averaged, or if `out` is not empty.
    """
    from rlhf.hub.cards import TAG
    from rlhf.models import averaging
    from rlhf.report.card import data_name, plain
    from rlhf.storage import disk, manifests
    from rlhf.text.tokenizer import load_tokenizer, same_ids

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: it exists, expected a new directory; remove it, or name another")
    folders = [Path(manifests.resolve_model_path(model, *FOLDERS)) for model in models]
    averaging.require_alike(folders)
    first = load_tokenizer(str(folders[0]))
    for folder in folders[1:]:
        if not same_ids(first, load_tokenizer(str(folder))):
            raise UserError(
                f"{folder}: got another tokenizer or chat template than that of {folders[0]}, expected the same; the "
                "weights of one token would be averaged with those of another"
            )
    architectures = disk.read_json(folders[0] / "config.json").get("architectures") or ()
    is_scorer = any("SequenceClassification" in name for name in architectures)
    with disk.atomic_directory(out) as staging:
        averaging.write_average(folders, staging)
        digests = [manifests.manifest_digest(str(folder)) for folder in folders]
        sources = [(str(plain(data_name(model))), digest) for model, digest in zip(models, digests, strict=True)]
        task = "text-classification" if is_scorer else "text-generation"
        disk.write_text(staging / manifests.CARD[0], averaging.card(sources, task, TAG))


def main() -> int:
    """Exit code 2 for a user's mistake."""
    title = "Average the weights of several models."
    options = parser.parse(AverageConfig, sys.argv[1:], console.program(NAME), title)
    if len(options.models) < 2 or options.out is None:
        raise UserError("rlhf average: expected MODEL MODEL ... --out DIR, two models or more")
    if len({*options.models}) < len(options.models):
        raise UserError(f"rlhf average: got a model twice in {' '.join(options.models)}, expected each once")
    console.loading(console.program(NAME), sys.argv)
    console.quiet_libraries()
    average(options.models, Path(options.out))
    console.say(f"wrote {options.out}: the mean of {len(options.models)} models")
    return 0
