"""`rlhf export PATH --merge OUT`: a plain transformers model of an adapter that a stage has saved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlhf import console
from rlhf.config import Config, parser
from rlhf.errors import UserError

FOLDERS = ("actor", "model", "critic")
"""folders of a stage, of which the first that there is is exported"""
GGUF = "llama.cpp's convert_hf_to_gguf.py makes a GGUF file of a whole model"


class ExportConfig(Config):
    """The adapter, and where its merged model goes."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("model",)

    model: str = ""
    """directory of a model that was saved with --share-trunk, of a finished stage, or of a run (its newest policy)"""
    merge: str | None = None
    """directory to write: the base model with the adapter added to its weights"""


def merge(path: str, out: Path) -> None:
    """Write the merged model of the adapter in a directory: a policy as a language model, a reward model or critic as a
    sequence classifier with one label.

    Raises: UserError if there is no adapter, or `out` is not empty.
    """
    from rlhf.config.options import FrozenOptions
    from rlhf.engine.export import save_policy, save_scalar
    from rlhf.engine.frozen import FrozenEngine
    from rlhf.hub.untrusted import is_adapter
    from rlhf.models.adapter_files import has_head
    from rlhf.models.load import load_causal_lm, load_config
    from rlhf.models.policy import Policy
    from rlhf.models.scalar import ScoreStatistics, load_scalar_model
    from rlhf.models.virtual_tokens import are_in
    from rlhf.storage import disk
    from rlhf.text.encoder import id_count
    from rlhf.text.tokenizer import load_tokenizer

    if not is_adapter(Path(path)):
        raise UserError(
            f"{path}: got no adapter, expected that of a run with --share-trunk or of peft; other models are whole"
        )
    if are_in(path):
        raise UserError(f"{path}: got virtual tokens, which have no merged form, expected another adapter")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--merge {out}: it exists, expected a new directory; remove it, or name another")
    tokenizer, config = load_tokenizer(path), load_config(path)
    dtype: Any = config.dtype
    ids = id_count(tokenizer)
    with disk.atomic_directory(out) as staging:
        if has_head(path):
            mean, std = (getattr(config, name, None) for name in ("score_mean", "score_std"))
            scores = None if mean is None or std is None else ScoreStatistics(mean, std)
            critic: Any = FrozenEngine(load_scalar_model(path, dtype, ids), FrozenOptions(zero_stage=0), dtype)
            save_scalar(critic, None, tokenizer, staging, scores)
        else:
            policy = Policy(load_causal_lm(path, dtype, ids))
            engine: Any = FrozenEngine(policy, FrozenOptions(zero_stage=0), dtype)
            save_policy(engine, None, tokenizer, staging)


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf export") -> int:
    """Exit code 2 for a user's mistake."""
    title = "Merge a saved adapter into its base model."
    words = console.words(argv)
    options = parser.parse(ExportConfig, words, program, title)
    if not options.model or options.merge is None:
        raise UserError(f"rlhf export: expected PATH --merge OUT; {GGUF}")
    console.loading(program, words)
    console.quiet_libraries()
    from rlhf.chain.chat import BY_NAME
    from rlhf.chat.run_models import run_models
    from rlhf.hub.untrusted import is_adapter
    from rlhf.storage import manifests

    path = manifests.resolve_model_path(options.model, *FOLDERS)
    if not is_adapter(Path(path)) and not (Path(path) / "config.json").is_file():
        run = run_models(path, BY_NAME)
        path = run.path(run.newest)
    merge(path, Path(options.merge))
    console.say(f"wrote {options.merge}: {path}, merged")
    return 0
