"""`python -m data.preview`: rows as the model will see them, and what became of each, before anything is trained."""

import sys
from typing import Literal

from pydantic import Field

from data.config import DataOptions
from rlhf import console
from rlhf.config import parser
from rlhf.errors import UserError

NAME = "python -m data.preview"
MODELS = ("model", "actor")
"""Models among what stages leave that the tokenizer may lie beside."""


class PreviewConfig(DataOptions):
    """Which data to look at, and for which model. A stage with the same options finds the rows tokenised."""

    model: str = "opt-1.3b"
    """where the tokenizer comes from: directory, hub id, short name or .yaml"""
    phases: tuple[Literal["sft", "reward", "ppo"], ...] = Field(("sft", "reward", "ppo"), min_length=1)
    """phases to show"""
    rows: int = Field(3, ge=0)
    """rows to show of each phase: the first ones of its training set"""
    loss_on: Literal["last", "every", "all"] = "last"
    """what fine-tuning learns of a dialogue: the last assistant turn, every assistant turn, or everything"""
    objective: Literal["response", "text"] = "response"
    """of fine-tuning: response = learn responses to prompts; text = continued pretraining on packed plain text,
    in which a token attends to the texts before its own too"""
    output: str | None = None
    """directory to write the tokenised rows to: PHASE/train.parquet, PHASE/evaluation.parquet, PHASE/report.json"""


def preview(options: PreviewConfig) -> list[str]:
    """Print every phase that the data can serve; why not, of those that it cannot.

    Raises: UserError if there is no such tokenizer, or `output` cannot be written.
    """
    from data.dataset import Recipe, open_datasets
    from data.preview import show
    from rlhf.hub.short_names import resolve
    from rlhf.storage.manifests import resolve_model_path
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

    place = resolve(resolve_model_path(options.model, *MODELS))
    tokenizer = prepare_tokenizer(load_tokenizer(place), options.chat_template)
    recipes = {
        "sft": Recipe("sft", options.loss_on, options.objective),
        "reward": Recipe("reward"),
        "ppo": Recipe("ppo"),
    }
    screen = show.Screen(show.terminal(sys.stdout), tokenizer)
    mistakes = []
    for phase in dict.fromkeys(options.phases):
        try:
            opened = open_datasets(options, recipes[phase], tokenizer)
        except UserError as mistake:
            mistakes.append(str(mistake))
            continue
        screen.show(opened, recipes[phase], options.rows)
        if options.output is not None:
            show.export(opened, options.output)
    return list(dict.fromkeys(mistakes))


def main() -> int:
    """Exit code 2 if some phase cannot be served; each reason is one line on stderr, said once."""
    options = parser.parse(
        PreviewConfig, sys.argv[1:], console.program(NAME), "Show the data as the model will see it."
    )
    console.quiet_libraries()
    mistakes = preview(options)
    for mistake in mistakes:
        print(f"error: {mistake}", file=sys.stderr)
    return 2 if mistakes else 0
