"""What to say when memory runs out: in which phase of a stage, at what size, and what needs less. Torch-free."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

PHASES = {
    ("rlhf.engine.training", "__init__"): "the optimizer's set-up",
    ("rlhf.engine.training", "step"): "an optimizer step",
    ("step3_ppo.rollout", "generate"): "generation",
    ("step3_ppo.rollout", "score"): "scoring",
    ("rlhf.training.checkpoints", "save"): "the saving of a checkpoint",
    ("rlhf.training.checkpoints", "restore"): "the reading of a checkpoint",
    ("step1_sft.stage", "perplexity"): "evaluation",
    ("step2_reward.stage", "evaluate"): "evaluation",
}
"""by module and function"""
LOADING = "the loading of the models"
SAMPLED = ("generation", "scoring")
SHOWN = 160
"""characters of the library's own message"""


def lack_of_memory(error: BaseException, options: Any, rank: int, ranks: int) -> str:
    """One line for the user: who, in which phase, at what size, what helps, and what the library said.

    options: of the stage that runs; what helps is named only where it is not yet chosen.
    """
    phase, set_to = phase_of(error), options.model_dump()
    helps = ", ".join(_knobs(phase, set_to, ranks))
    library = (str(error).splitlines() or [type(error).__name__])[0][:SHOWN]
    return f"rank {rank}: out of memory in {phase} ({_size(phase, set_to)}); try {helps} ({library})"


def phase_of(error: BaseException) -> str:
    """The innermost of PHASES that the error came out of."""
    phase = LOADING
    for module, function in _frames(error.__traceback__):
        phase = PHASES.get((module, function), phase)
    return phase


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    while trace is not None:
        frame = trace.tb_frame
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        trace = trace.tb_next


def _size(phase: str, options: Mapping[str, Any]) -> str:
    """The most rows and tokens that one pass of the phase has."""
    rows = options["rollout_batch_size" if phase in SAMPLED else "micro_batch_size"]
    if "response_length" in options:
        tokens = options["max_prompt_length"] + options["response_length"]
    else:
        tokens = options["max_length"]
    whole = "" if options.get("batch_tokens") else f", batches of {options['batch_size']}"
    return f"at once {rows} rows of up to {tokens} tokens{whole}"


def _knobs(phase: str, options: Mapping[str, Any], ranks: int) -> Iterator[str]:
    rows = "rollout_batch_size" if phase in SAMPLED else "micro_batch_size"
    if options[rows] > 1:
        yield f"--{rows.replace('_', '-')} {options[rows] // 2}"
    if phase not in SAMPLED and not options["gradient_checkpointing"]:
        yield "--gradient-checkpointing"
    if ranks > 1 and options["zero_stage"] < 3:
        yield "--zero-stage 3"
    if not options["offload_optimizer"]:
        yield "--offload-optimizer"
    for frozen in ("reference", "reward_models"):
        if frozen in options and not options[frozen]["offload"]:
            yield f"--{frozen.replace('_', '-')}.offload"
    yield "shorter rows (--response-length)" if "response_length" in options else "shorter rows (--max-length)"
