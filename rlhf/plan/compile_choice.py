"""Whether a run compiles its layers, where the user sets neither --torch-compile nor --no-torch-compile.

The choice depends on options, model, data and machine only: a run that is resumed has the same one. On GPUs
training is not compiled unasked, because it was not measured there; decode steps are (rlhf/kernels/decoding.py).
"""

from rlhf import console
from rlhf.config.options import E
from rlhf.distributed import collectives
from rlhf.engine.precision import compute_dtype
from rlhf.errors import UserError
from rlhf.models.load import load_config
from rlhf.plan.cost import forward_flops
from rlhf.plan.devices import PlanOptions
from rlhf.plan.machine import describe_machine
from rlhf.plan.sizes import size
from rlhf.training.checks import check_engine

START_S = 120.0
"""seconds that compiling takes the first time on a machine; with the compiler's cache it takes 10 to 30"""
SAVED = 0.28
"""share of the time that compiled layers save on CPUs: 1 - 1 / 1.4 (docs/results.md)"""
FAMILIES = frozenset({
    "opt", "gpt2", "gpt_neo", "gptj", "llama", "qwen2", "qwen3", "bloom", "gpt_neox", "mistral", "mixtral", "gemma2",
    "falcon", "mpt", "gpt_bigcode", "qwen3_moe", "gemma", "gemma3_text", "phi", "phi3", "glm", "glm4", "stablelm",
    "cohere", "cohere2", "olmo2", "olmoe", "smollm3", "granite", "starcoder2", "nemotron", "ernie4_5", "exaone4",
    "seed_oss", "helium", "gpt_oss", "deepseek_v2", "deepseek_v3",
})  # fmt: skip
"""types of models whose compiled layers tests compare with eager ones (tests/rlhf/kernels/test_compiling.py)"""


def choose_compiler(options: E, stage: str, model_path: str, tokens: float) -> E:
    """The options with `torch_compile` chosen if it is not set. Prints a line if the layers are compiled.

    tokens: of all rows of the run, counted once for each forward and backward pass
    """
    device, ranks = collectives.local_device(), collectives.world_size()
    if options.torch_compile is not None or device.type != "cpu":
        return options
    if load_config(model_path).model_type not in FAMILIES:
        return options
    machine = describe_machine(PlanOptions(device="cpu", devices=ranks), ranks)
    operations = 3 * forward_flops(size(model_path, "lm"), tokens, 1, 1)  # but for attention, rows of one token
    rate = ranks * machine.flops(compute_dtype(options, device).itemsize)
    if SAVED * operations / rate < 2 * START_S:
        return options
    chosen = options.model_copy(update={"torch_compile": True})
    try:
        check_engine(chosen)
    except UserError:
        return options
    console.say(f"{stage}: layers are compiled, which repays its start in a run this long (--no-torch-compile: off)")
    return chosen
