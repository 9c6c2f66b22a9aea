"""`rlhf export PATH --merge OUT`: a plain transformers model of an adapter that a stage has saved; with `--at`, a
policy between the reference and the tuned one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlhf import console
from rlhf.config import Config, parser
from rlhf.errors import UserError

FOLDERS = ("actor", "model", "critic")
"""folders of a stage, of which the first that there is is exported"""
GGUF = "llama.cpp's convert_hf_to_gguf.py makes a GGUF file of a whole model"


class ExportConfig(Config):
    """The model, and where the new one goes."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("model",)

    model: str = ""
    """directory of a model that was saved with --share-trunk, of a finished stage, or of a run (its newest policy)"""
    merge: str | None = None
    """directory to write: the base model with the adapter added to its weights, or the policy of --at"""
    at: Annotated[float, Field(ge=0)] | Literal["best"] | None = None
    """how far to go from the reference, 0, to the tuned policy, 1, on the straight line between their weights: below 1
    it has a smaller KL and a lower score. best: as far as no loss is shown on step 1's held-out demonstrations, and on
    --keep. For a run or a stage of whole models"""
    keep: str | None = None
    """with --at best: questions on which the policy must not lose, in a file as --multiple-choice of step 3 takes it"""


def merge(path: str, out: Path) -> None:
    """Write the merged model of the adapter in a directory: a policy as a language model, a reward model or critic as a
    sequence classifier with one label.

    Raises: UserError if there is no adapter, or `out` is not empty.
    """
    from rlhf.chain.line import require_new, write_policy
    from rlhf.config.options import FrozenOptions
    from rlhf.engine.export import save_scalar
    from rlhf.engine.frozen import FrozenEngine
    from rlhf.hub.untrusted import is_adapter
    from rlhf.models.adapter_files import has_head
    from rlhf.models.load import load_causal_lm, load_config
    from rlhf.models.scalar import ScoreStatistics, load_scalar_model
    from rlhf.storage import disk
    from rlhf.text.encoder import id_count
    from rlhf.text.tokenizer import load_tokenizer

    if not is_adapter(Path(path)):
        raise UserError(
            f"{path}: got no adapter, expected that of a run with --share-trunk or of peft; other models are whole"
        )
    require_new(out)
    tokenizer, config = load_tokenizer(path), load_config(path)
    dtype: Any = config.dtype
    ids = id_count(tokenizer)
    if not has_head(path):
        write_policy(load_causal_lm(path, dtype, ids), tokenizer, out)
        return
    mean, std = (getattr(config, name, None) for name in ("score_mean", "score_std"))
    scores = None if mean is None or std is None else ScoreStatistics(mean, std)
    critic: Any = FrozenEngine(load_scalar_model(path, dtype, ids), FrozenOptions(zero_stage=0), dtype)
    with disk.atomic_directory(out) as staging:
        save_scalar(critic, None, tokenizer, staging, scores)


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf export") -> int:
    """Exit code 2 for a user's mistake."""
    title = "Merge a saved adapter into its base model, or choose a policy between the reference and the tuned one."
    words = console.words(argv)
    options = parser.parse(ExportConfig, words, program, title)
    if not options.model or options.merge is None:
        raise UserError(f"rlhf export: expected PATH --merge OUT, or PATH --at 0.7 --merge OUT; {GGUF}")
    if options.keep is not None and options.at != "best":
        raise UserError(f"--keep {options.keep}: expected --at best beside it, which chooses the policy by it")
    console.loading(program, words)
    console.quiet_libraries()
    from rlhf.chain import line
    from rlhf.chain.chat import BY_NAME
    from rlhf.chat.run_models import run_models
    from rlhf.hub.untrusted import is_adapter
    from rlhf.storage import manifests

    if options.at is not None:
        run = run_models(options.model, BY_NAME)
        path, reference = run.path(run.newest), run.references.get(run.newest)
        if reference is None:
            raise UserError(f"--at: {options.model} does not say what its policy was trained from; expected a run")
        ends, out = (run.path(reference), path), Path(options.merge)
        at = line.best(*ends, options.keep, out) if options.at == "best" else line.between(*ends, options.at, out)
        console.say(f"wrote {options.merge}: {at:g} of the way from {reference} to {path}")
        return 0
    path = manifests.resolve_model_path(options.model, *FOLDERS)
    if not is_adapter(Path(path)) and not (Path(path) / "config.json").is_file():
        run = run_models(path, BY_NAME)
        path = run.path(run.newest)
    merge(path, Path(options.merge))
    console.say(f"wrote {options.merge}: {path}, merged")
    return 0
