"""`python -m data.preview`: rows as the model will see them, and the outcome of each, before training."""

import sys
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from data.config import DataOptions
from rlhf import console
from rlhf.config import parser
from rlhf.errors import UserError

MODELS = ("model", "actor")
"""models in a stage's output directory that have a tokenizer"""


class PreviewConfig(DataOptions):
    """Which data to show, and for which model. A stage with the same options then finds the rows in the cache."""

    model: str = "opt-1.3b"
    """where the tokenizer comes from: directory, hub id, short name or .yaml"""
    phases: tuple[Literal["sft", "reward", "ppo"], ...] = Field(("sft", "reward", "ppo"), min_length=1)
    """phases to show"""
    rows: int = Field(3, ge=0)
    """rows to show of each phase: the first of its training rows"""
    loss_on: Literal["last", "every", "all"] = "last"
    """what fine-tuning learns of a dialogue: the last assistant turn, every assistant turn, or all tokens"""
    objective: Literal["response", "text"] = "response"
    """of fine-tuning: response = learn responses to prompts; text = continued pretraining on packed plain text,
    in which a token attends to the texts before its own too"""


def undivided(options: PreviewConfig, phase: str) -> PreviewConfig:
    """The options that leave all rows to one phase, hold none out, and refuse none."""
    from data.prepare.split import PHASES

    shares = tuple(float(name == phase) for name in PHASES)
    return options.model_copy(update={"data_split": shares, "eval_fraction": 0.0, "max_dropped": 1.0})


def preview(options: PreviewConfig) -> list[str]:
    """Print every phase that the data can serve. Returns an error message for each other phase.

    Of a phase that gets too few rows, all that it could use are shown.
    Raises: UserError if there is no such tokenizer.
    """
    from data.dataset import Recipe
    from data.preview import show
    from rlhf.hub.short_names import resolve
    from rlhf.storage.manifests import resolve_model_path
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

    path = resolve(resolve_model_path(options.model, *MODELS))
    tokenizer = prepare_tokenizer(load_tokenizer(path), options.chat_template, options.chat_template_kwargs)
    recipes: dict[str, Recipe] = {
        "sft": Recipe("sft", options.loss_on, options.objective),
        "reward": Recipe("reward"),
        "ppo": Recipe("ppo"),
    }
    screen = show.Screen(show.make_console(sys.stdout), tokenizer)
    errors = []
    for phase in dict.fromkeys(options.phases):
        recipe = recipes[phase]
        datasets, error = _open(options, recipe, tokenizer)
        if datasets is not None:
            screen.show(datasets, recipe, options.rows)
        if error:
            errors.append(error if datasets is None else f"{error}; the tables above show what {phase} could use")
    return list(dict.fromkeys(errors))


def _open(options: PreviewConfig, recipe: Any, tokenizer: Any) -> tuple[Any, str]:
    """(the data of a phase; of one that is refused all that it could use, or None; why it is refused)."""
    from data.dataset import open_datasets

    try:
        return open_datasets(options, recipe, tokenizer), ""
    except UserError as error:
        try:
            return open_datasets(undivided(options, recipe.phase), recipe, tokenizer), str(error)
        except UserError:
            return None, str(error)


def main(argv: Sequence[str] | None = None, program: str = "python -m data.preview") -> int:
    """Exit code 2 if the data cannot serve some phase. Each different reason is one line on stderr."""
    words = console.words(argv)
    options = parser.parse(PreviewConfig, words, program, "Show the data as the model will see it.")
    console.quiet_libraries()
    errors = preview(options)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 2 if errors else 0
