"""Attention, decode steps and compiled layers that are faster than transformers' and torch's, on CPUs and GPUs. Other
rooms use these functions only. Where nothing is faster, each leaves a model as transformers and torch have it."""

from rlhf.kernels.attention import install as install
from rlhf.kernels.attention import installed as installed
from rlhf.kernels.compiling import compile_layers as compile_layers
from rlhf.kernels.compiling import eager as eager
from rlhf.kernels.compiling import require_compiler as require_compiler
from rlhf.kernels.compiling import round_like_eager as round_like_eager
from rlhf.kernels.decoding import Choice as Choice
from rlhf.kernels.decoding import Step as Step
from rlhf.kernels.decoding import compile_decoding as compile_decoding
from rlhf.kernels.decoding import decode_step as decode_step
from rlhf.kernels.memory import keep_freed_memory as keep_freed_memory
