"""What is said when memory runs out."""

import pytest
import torch

from rlhf import errors
from rlhf.chain.stages import STAGES
from rlhf.training import out_of_memory
from step1_sft.config import STAGE as SFT_STAGE
from step1_sft.config import SFTConfig
from step3_ppo.algorithms.ppo import Config as PPO
from step3_ppo.config import STAGE as PPO_STAGE

KNOWN = [*out_of_memory.PHASES, *(location for stage in STAGES.values() for location in stage.phases)]


def raised_in(module: str, function: str, error: Exception, within: tuple[str, str] | None = None) -> Exception:
    """The error with the traceback of a function of that name in a module of that name."""
    scope = {"__name__": module, "error": error}
    exec(f"def {function}(): raise error", scope)
    call = scope[function]
    if within is not None:
        outer = {"__name__": within[0], "inner": call}
        exec(f"def {within[1]}(): inner()", outer)
        call = outer[within[1]]
    with pytest.raises(type(error)) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("error", "is_out_of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (OSError("cannot allocate memory"), False),
    ],
)
def test_what_is_a_lack_of_memory(error: Exception, is_out_of_memory: bool) -> None:
    assert errors.is_out_of_memory(error) == is_out_of_memory


def test_torch_says_it_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert errors.is_out_of_memory(caught.value)


def test_the_line_has_the_size_and_what_helps() -> None:
    options = SFTConfig(batch_size=64, micro_batch_size=8, max_length=512)
    error = raised_in("rlhf.engine.training", "step", torch.OutOfMemoryError("CUDA out of memory. Tried ..."))
    assert out_of_memory.memory_advice(error, options, {}, 1, 2) == (
        "rank 1: out of memory in an optimizer step (at once 8 rows of up to 512 tokens, batches of 64); try "
        "--micro-batch-size 4, --gradient-checkpointing, --zero-stage 3, --offload-optimizer, shorter rows "
        "(--max-length) (CUDA out of memory. Tried ...)"
    )


def test_what_is_chosen_already_is_no_advice() -> None:
    options = SFTConfig(micro_batch_size=1, gradient_checkpointing=True, zero_stage=3, offload_optimizer=True)
    advice = out_of_memory.memory_advice(raised_in("rlhf.engine.training", "step", MemoryError()), options, {}, 0, 2)
    assert advice.endswith("; try shorter rows (--max-length) (MemoryError)")
    # With one process there is nobody to share weights with.
    assert "--zero-stage" not in out_of_memory.memory_advice(MemoryError(), SFTConfig(), {}, 0, 1)


def test_a_rollout_has_knobs_of_its_own() -> None:
    options = PPO(max_prompt_length=100, response_length=28, rollout_batch_size=64, micro_batch_size=8)
    error = raised_in("step3_ppo.rollout", "generate", MemoryError(), within=("step3_ppo.stage", "evaluate"))
    advice = out_of_memory.memory_advice(error, options, PPO_STAGE.phases, 0, 1)
    assert "in generation (at once 64 rows of up to 128 tokens" in advice
    assert (
        "--rollout-batch-size 32" in advice and "--reference.offload" in advice and "--micro-batch-size" not in advice
    )


@pytest.mark.parametrize(("chosen", "rows"), [(64, 64), (None, 8)])
def test_an_evaluation_names_the_rows_of_its_passes(chosen: int | None, rows: int) -> None:
    options = SFTConfig(micro_batch_size=8, eval_batch_size=chosen)
    error = raised_in("step1_sft.stage", "perplexity", MemoryError())
    advice = out_of_memory.memory_advice(error, options, SFT_STAGE.phases, 0, 1)
    assert f"in evaluation (at once {rows} rows of" in advice and f"try --eval-batch-size {rows // 2}, " in advice


def test_the_innermost_phase_counts() -> None:
    assert out_of_memory.phase_of(MemoryError(), {}) == out_of_memory.LOADING
    inner = raised_in("rlhf.engine.training", "__init__", MemoryError(), within=("rlhf.training.run", "open_run"))
    assert out_of_memory.phase_of(inner, {}).name == "the optimizer's set-up"


@pytest.mark.parametrize("location", KNOWN, ids=".".join)
def test_the_phases_are_there(location: tuple[str, str]) -> None:
    module = __import__(location[0], fromlist=["x"])
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    assert any(location[1] in vars(owner) for owner in owners)
