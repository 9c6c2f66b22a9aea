"""`python -m data.preview`: rows as the model will see them, and the outcome of each, before training."""

import sys
from typing import Literal

from pydantic import Field

from data.config import DataOptions
from rlhf import console
from rlhf.config import parser
from rlhf.errors import UserError

NAME = "python -m data.preview"
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
    html: str | None = None
    """file to write a page with the same to, for a browser"""
    output: str | None = None
    """directory to write the tokenised rows to: PHASE/train.parquet, PHASE/evaluation.parquet, PHASE/report.json"""


def undivided(options: PreviewConfig, phase: str) -> PreviewConfig:
    """The options that leave all rows to one phase, and hold none out."""
    from data.build.split import PHASES

    shares = tuple(float(name == phase) for name in PHASES)
    return options.model_copy(update={"data_split": shares, "eval_fraction": 0.0})


def preview(options: PreviewConfig) -> list[str]:
    """Print every phase that the data can serve. Returns an error message for each other phase.

    Of a phase that gets too few rows, all that it could use are shown.
    Raises: UserError if there is no such tokenizer, or `output` cannot be written.
    """
    from data.dataset import Recipe, open_datasets
    from data.preview import page, show
    from rlhf.hub.short_names import resolve
    from rlhf.storage.manifests import resolve_model_path
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

    path = resolve(resolve_model_path(options.model, *MODELS))
    tokenizer = prepare_tokenizer(load_tokenizer(path), options.chat_template)
    recipes = {
        "sft": Recipe("sft", options.loss_on, options.objective),
        "reward": Recipe("reward"),
        "ppo": Recipe("ppo"),
    }
    screen = show.Screen(show.make_console(sys.stdout), tokenizer)
    errors = []
    phases = []
    for phase in dict.fromkeys(options.phases):
        try:
            datasets = open_datasets(options, recipes[phase], tokenizer)
        except UserError as error:
            try:
                datasets = open_datasets(undivided(options, phase), recipes[phase], tokenizer)
            except UserError:
                errors.append(str(error))
                continue
            errors.append(f"{error}; above are all rows that {phase} can use")
        screen.show(datasets, recipes[phase], options.rows)
        if options.html is not None:
            phases.append(page.describe_phase(datasets, recipes[phase], tokenizer, options.rows))
        if options.output is not None:
            show.export(datasets, options.output)
    different_errors = list(dict.fromkeys(errors))
    if options.html is not None:
        page.write(options.html, options.model, phases, different_errors)
    return different_errors


def main() -> int:
    """Exit code 2 if the data cannot serve some phase. Each different reason is one line on stderr."""
    options = parser.parse(
        PreviewConfig, sys.argv[1:], console.program(NAME), "Show the data as the model will see it."
    )
    console.quiet_libraries()
    errors = preview(options)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 2 if errors else 0
