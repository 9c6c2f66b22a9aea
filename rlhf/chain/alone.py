"""One stage by itself, `python -m step3_ppo` or `rlhf ppo`: a chain of that step, with the stage's options as typed."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import create_model

from rlhf import console, streams
from rlhf.chain import command, early
from rlhf.chain.options import SECTIONS, ChainConfig, ProcessOptions
from rlhf.chain.stages import STAGES
from rlhf.config import deepspeed_json, parser
from rlhf.config.options import RunOptions
from rlhf.config.short_help import STAGE_GROUPS, short_help
from rlhf.training.stage_process import with_adapter_rates

OptionsOf = Callable[[list[str]], type[RunOptions]]
"""command line -> the class of the stage's options, which for step 3 depends on the algorithm"""


class StageAlone(ChainConfig):
    """A chain of one step, whose section has what the user typed; the options at the top are not of its stages."""

    ALONE: ClassVar[bool] = True


def run(step: int, options_of: OptionsOf, argv: Sequence[str] | None = None, program: str = "") -> int:
    """Run the command line of a stage. program: what the user typed before the options, if not `python -m STAGE`"""
    program = program or f"python -m {STAGES[step].name}"
    read = partial(read_command, step, options_of)
    return command.run(console.words(argv), program, read, _output_dir)


def _output_dir(words: list[str]) -> str:
    """The output directory of these words. Raises: UserError."""
    return command.output_dir_of(deepspeed_json.plain_words(words), RunOptions)


def read_command(step: int, options_of: OptionsOf, words: list[str], program: str) -> command.Command | None:
    """The chain of a stage's command line. Raises: UserError."""
    typed, stage = deepspeed_json.plain_words(words), STAGES[step]
    streams.ignore_broken_streams(report=not {"--print-config", *command.TEXTS} & {*typed})
    console.loading(program.rpartition(" ")[2], typed)
    options = options_of(typed)
    typed_options = _with_processes(options)
    if {"--help", "-h"} & {*typed}:
        print(short_help(typed_options, program, stage.title, {**stage.help_groups, **STAGE_GROUPS}))
        return None
    settings = parser.peek(typed, deepspeed_json.CONFIG, "")
    overlay = parser.Overlay(deepspeed_json.options(settings, options), deepspeed_json.CONFIG)

    def finished(parsed: Any, names: Collection[str]) -> Any:
        if "--print-config" not in typed:
            early.refuse_plain_mistakes(_chain(step, options, parsed))
        return with_adapter_rates(parsed, names)

    parsed = parser.parse(typed_options, typed, program, stage.title, overlay, finished)
    deepspeed_json.require_agreement(settings, parsed)
    return command.Command(_chain(step, options, parsed), typed)


def _with_processes(options: type[RunOptions]) -> type[RunOptions]:
    """The class of what a user may type for a stage."""
    bases: Any = (options, ProcessOptions)
    return create_model(options.__name__, __base__=bases)


def _chain(step: int, options: type[RunOptions], parsed: Any) -> StageAlone:
    """The chain of one step with these options."""
    of_stage = options.model_construct(**{name: getattr(parsed, name) for name in options.model_fields})
    of_processes = {name: getattr(parsed, name) for name in ProcessOptions.model_fields}
    section: Any = {SECTIONS[step]: (options, of_stage)}
    chain_class = create_model("StageAlone", __base__=StageAlone, **section)
    return chain_class(steps=(step,), output_dir=parsed.output_dir, **of_processes, **{SECTIONS[step]: of_stage})
