"""What to say when memory runs out: in which phase of a stage, at what size, and what needs less. Torch-free."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from rlhf.config.declaration import Phase
from rlhf.config.options import FrozenOptions, RunOptions

PHASES = {
    ("rlhf.engine.training", "__init__"): Phase("the optimizer's set-up"),
    ("rlhf.engine.training", "step"): Phase("an optimizer step"),
    ("rlhf.training.checkpoints", "save"): Phase("the saving of a checkpoint"),
    ("rlhf.training.checkpoints", "restore"): Phase("the reading of a checkpoint"),
}
"""of every stage, by module and function"""
LOADING = Phase("the loading of the models")
Phases = Mapping[tuple[str, str], Phase]
SHOWN = 160
"""characters of the library's own message"""


def lack_of_memory(error: BaseException, options: RunOptions, phases: Phases, rank: int, ranks: int) -> str:
    """One line for the user: who, in which phase, at what size, what helps, and what the library said.

    options, phases: of the stage that runs; what helps is named only where it is not yet chosen.
    """
    phase, set_to = phase_of(error, phases), dict(options)
    helps = ", ".join(_knobs(phase, set_to, ranks))
    library = (str(error).splitlines() or [type(error).__name__])[0][:SHOWN]
    return f"rank {rank}: out of memory in {phase.name} ({_size(phase, set_to)}); try {helps} ({library})"


def phase_of(error: BaseException, phases: Phases) -> Phase:
    """The innermost of PHASES and of the stage's own `phases` that the error came out of."""
    known, phase = {**PHASES, **phases}, LOADING
    for place in _frames(error.__traceback__):
        phase = known.get(place, phase)
    return phase


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    while trace is not None:
        frame = trace.tb_frame
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        trace = trace.tb_next


def _size(phase: Phase, options: Mapping[str, Any]) -> str:
    """The most rows and tokens that one pass of the phase has."""
    if "response_length" in options:
        tokens = options["max_prompt_length"] + options["response_length"]
    else:
        tokens = options["max_length"]
    whole = "" if options.get("batch_tokens") else f", batches of {options['batch_size']}"
    return f"at once {options[phase.rows]} rows of up to {tokens} tokens{whole}"


def _knobs(phase: Phase, options: Mapping[str, Any], ranks: int) -> Iterator[str]:
    if options[phase.rows] > 1:
        yield f"--{phase.rows.replace('_', '-')} {options[phase.rows] // 2}"
    if phase.rows == "micro_batch_size" and not options["gradient_checkpointing"]:
        yield "--gradient-checkpointing"
    if ranks > 1 and options["zero_stage"] < 3:
        yield "--zero-stage 3"
    if not options["offload_optimizer"]:
        yield "--offload-optimizer"
    for name, value in options.items():
        if isinstance(value, FrozenOptions) and not value.offload:
            yield f"--{name.replace('_', '-')}.offload"
    yield "shorter rows (--response-length)" if "response_length" in options else "shorter rows (--max-length)"
