"""Everything that exists for speed on CPUs. Other rooms use it by these functions only, on every device: where nothing
is faster, each leaves a model as transformers and torch have it.

install, installed: our attention in a loaded model, which packed rows need (attention.py; C++ in kernels.py)
compile_layers, require_compiler, round_like_eager, eager: layers under torch.compile (compiling.py)
decode_step: a function for one decode step (decoding.py)
keep_freed_memory: pages that stay with the process (memory.py)
"""

from rlhf.cpu.attention import install, installed
from rlhf.cpu.compiling import compile_layers, eager, require_compiler, round_like_eager
from rlhf.cpu.decoding import Step, decode_step
from rlhf.cpu.memory import keep_freed_memory

__all__ = [
    "Step", "compile_layers", "decode_step", "eager", "install", "installed", "keep_freed_memory", "require_compiler",
    "round_like_eager",
]  # fmt: skip
