"""The limits of a machine, measured beside a benchmark, and the minimal work of training and decoding.

Work of one forward pass, in floating-point operations (a multiplication and an addition are two):

    2 W n + 2 H k + 4 A sum over rows of s (s + 1) / 2

W weights of all linear layers but the head, n real tokens, H weights of the head, k tokens that the loss predicts, A
layers x heads x width of a head (queries with keys, then weights with values: two products a pair of tokens), s tokens
of a row, each of which attends to itself and the earlier ones. A backward pass costs twice a forward pass. Not counted:
padding, tokens that are computed twice, logits that no loss needs, recomputation, the optimizer, and all operations
that are not products.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import WorkerPipe

SHAPES = ((1024, 576, 576), (1024, 576, 1536), (1024, 1536, 576), (256, 576, 49152), (1536, 1536, 1536))
"""(rows, inputs, outputs): the layers of SmolLM2-135M for 1024 tokens, its head for 256, and a square"""
MEASURE_S = 0.15
"""seconds for each shape in a repeat"""
READ_BYTES = 2**29


def contender(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """Measure the device of the other contenders at each request, between them."""
    import torch

    from rlhf.distributed.collectives import local_device

    dtypes, device = {"fp32": torch.float32, "bf16": torch.bfloat16}, local_device()
    memory = torch.ones(READ_BYTES // 4, device=device)
    pipe.ready()
    while pipe.next_request():
        start = time.perf_counter()
        values: dict[str, Any] = {"read_gb_per_s": read_rate(memory) / 1e9}
        for name, dtype in dtypes.items():
            rates = {"x".join(map(str, shape)): product_rate(shape, dtype, device) / 1e9 for shape in SHAPES}
            values |= {f"{name}_gflops": max(rates.values()), f"{name}_by_shape": rates}
        pipe.reply(seconds=time.perf_counter() - start, **values)


def product_rate(shape: tuple[int, int, int], dtype: Any, device: Any) -> float:
    """Floating-point operations per second of `torch.mm` in a linear layer, weights [outputs, inputs]; median."""
    import torch

    rows, inputs, outputs = shape
    x, w = (torch.randn(count, inputs, device=device).to(dtype) for count in (rows, outputs))
    seconds = _seconds(lambda: torch.mm(x, w.t()), MEASURE_S)
    return 2 * rows * inputs * outputs / seconds


def read_rate(memory: Any) -> float:
    """Bytes per second that are read by a sum over memory much larger than the caches; median."""
    return memory.numel() * memory.element_size() / _seconds(memory.sum, MEASURE_S)


def _seconds(call: Callable[[], object], budget: float) -> float:
    """The median of the seconds of `call`, each until the device has done its work, for about `budget` seconds."""
    call()
    values: list[float] = []
    while sum(values) < budget or len(values) < 3:
        values.append(harness.seconds_of(call))
    return statistics.median(values)


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of one token in a model."""

    linear: int
    """weights of the linear layers, without the head"""
    head: int
    """weights of the language model's head"""
    attention: int
    """layers x heads x width of a head"""
    cache: int
    """numbers per token in the key-value cache"""

    def forward(self, tokens: float, predicted: float, pairs: float) -> float:
        """Floating-point operations. pairs: of tokens that attend to each other, over all rows (`attention_pairs`)."""
        return 2.0 * self.linear * tokens + 2.0 * self.head * predicted + 4.0 * self.attention * pairs

    def training(self, tokens: float, predicted: float, pairs: float, adapter: bool = False) -> float:
        """Forward and backward; with an adapter, without the gradients of the frozen weights."""
        return (2 if adapter else 3) * self.forward(tokens, predicted, pairs)

    def decoding_bytes(self, cached: float, width: int) -> float:
        """Bytes read in a decode step: every weight and the cache once. width: bytes per number.

        cached: tokens in the cache, over all rows.
        """
        return width * (self.linear + self.head + self.cache * cached)


def model_work(path: str) -> Work:
    """The work of a causal language model whose linear layers are `nn.Linear`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    grouped = getattr(config, "num_key_value_heads", None) or heads
    return Work(
        linear=sum(m.weight.numel() for m in linear),
        head=head.weight.numel(),
        attention=config.num_hidden_layers * heads * width,
        cache=2 * config.num_hidden_layers * grouped * width,
    )


def attention_pairs(lengths: Iterable[int], before: int = 0) -> float:
    """Pairs of a token and one that it attends to, in rows of these lengths each after `before` earlier ones."""
    return float(sum(s * (s + 1) // 2 + s * before for s in lengths))
