"""The message when memory runs out: the phase of the stage, its size, and options that need less. Torch-free."""

from collections.abc import Iterator, Mapping
from types import TracebackType

from rlhf.config import Tree
from rlhf.config.declaration import Phase
from rlhf.config.options import FrozenOptions, RunOptions, SharedOptimizerOptions

PHASES = {
    ("rlhf.engine.training", "__init__"): Phase("the optimizer's set-up"),
    ("rlhf.engine.training", "step"): Phase("an optimizer step"),
    ("rlhf.training.checkpoints", "save"): Phase("the saving of a checkpoint"),
    ("rlhf.training.checkpoints", "restore"): Phase("the reading of a checkpoint"),
}
"""phases of every stage, by module and function"""
LOADING = Phase("the loading of the models")
Phases = Mapping[tuple[str, str], Phase]
SHOWN = 160
"""characters of the library's own message that are shown"""


def memory_advice(error: BaseException, options: RunOptions, phases: Phases, rank: int, ranks: int) -> str:
    """One line for the user: rank, phase, size, options that help, and the library's message.

    options, phases: of the stage that runs; an option is named only if it is not already set.
    """
    phase, values = phase_of(error, phases), dict(options)
    if isinstance(options, SharedOptimizerOptions):
        values["eval_batch_size"] = options.eval_rows
    remedies = ", ".join(_remedies(phase, values, ranks))
    library = (str(error).splitlines() or [type(error).__name__])[0][:SHOWN]
    return f"rank {rank}: out of memory in {phase.name} ({_size(phase, values)}); try {remedies} ({library})"


def phase_of(error: BaseException, phases: Phases) -> Phase:
    """The innermost phase in the error's traceback, of PHASES and of the stage's own `phases`."""
    all_phases, phase = {**PHASES, **phases}, LOADING
    for function in _frames(error.__traceback__):
        phase = all_phases.get(function, phase)
    return phase


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    while trace is not None:
        frame = trace.tb_frame
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        trace = trace.tb_next


def _size(phase: Phase, options: Tree) -> str:
    """The most rows and tokens that one pass of the phase has."""
    if "response_length" in options:
        tokens = options["max_prompt_length"] + options["response_length"]
    else:
        tokens = options["max_length"]
    batch = "" if options.get("batch_tokens") else f", batches of {options['batch_size']}"
    return f"at once {options[phase.rows]} rows of up to {tokens} tokens{batch}"


def _remedies(phase: Phase, options: Tree, ranks: int) -> Iterator[str]:
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
