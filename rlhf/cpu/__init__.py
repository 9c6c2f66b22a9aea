"""Everything that exists for speed on CPUs. Other rooms use it by these functions only, on every device: where nothing
is faster, each leaves a model as transformers and torch have it."""

from rlhf.cpu.attention import install as install
from rlhf.cpu.attention import installed as installed
from rlhf.cpu.compiling import compile_layers as compile_layers
from rlhf.cpu.compiling import eager as eager
from rlhf.cpu.compiling import require_compiler as require_compiler
from rlhf.cpu.compiling import round_like_eager as round_like_eager
from rlhf.cpu.decoding import Step as Step
from rlhf.cpu.decoding import decode_step as decode_step
from rlhf.cpu.memory import keep_freed_memory as keep_freed_memory
