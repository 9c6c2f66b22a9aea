"""Parts of benchmarks/gpu.py without a stage: rates of the device, decode steps, bits of a backward pass."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import inputs, random_models
from benchmarks.gpu_part import Options, Results, median
from benchmarks.harness import clock
from benchmarks.limits import product_rate, read_rate
from rlhf.distributed.collectives import local_device


def rates(options: Options, results: Results) -> None:
    """What bounds everything: bytes and products per second, the host's time for an operation, kernels, the step."""
    from rlhf.distributed import tensor_parallel
    from rlhf.engine.adamw import MasterAdamW
    from rlhf.models import variable_length
    from rlhf.types import to_device

    device, dtype = local_device(), random_models.dtype()
    memory = torch.ones(2**20 if options.tiny else 2**30, device=device)
    square = (256, 256, 256) if options.tiny else (8192, 8192, 8192)
    results.add(read_gb_per_s=read_rate(memory) / 1e9, product_tflops=product_rate(square, dtype, device) / 1e12)
    small, ids, count = torch.zeros(64, device=device), torch.zeros(64, 512, dtype=torch.long), 1000
    started = median(lambda: [small.add_(1) for _ in range(count)], options) / count
    results.add(operation_us=1e6 * started, upload_us=1e6 * median(lambda: to_device(ids, device), options))
    for kernel in (variable_length.flash, variable_length.flex):
        start = clock()
        works = variable_length.works(kernel, device, dtype, 64)
        results.add(**{kernel.__name__: works, f"{kernel.__name__}_s": clock() - start})
    d, layers, rows = (16, 2, 100) if options.tiny else (2048, 24, 50272)
    shapes = [(rows, d), *[*[(d, d)] * 4, (4 * d, d), (d, 4 * d), *[(d,)] * 9, (4 * d,)] * layers]
    weights = [nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) for shape in shapes]
    adam = MasterAdamW(weights, lr=1e-6)
    adam.sum_gradients_in(torch.float32)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, device=device)
    results.add(adamw_ms=1e3 * median(adam.step, options))
    results.add(norm_ms=1e3 * median(lambda: tensor_parallel.gradient_norm(weights), options))


def decode(options: Options, results: Results) -> None:
    """Decode steps of 16 and 64 rows without an end: bytes of weights and cache over the bandwidth of the machine."""
    from rlhf import kernels
    from rlhf.config.options import SamplingOptions
    from rlhf.generation import open_backend
    from rlhf.maths.uniforms import uniforms
    from rlhf.models.load import load_causal_lm
    from rlhf.plan import sizes

    device, (actor, _) = local_device(), random_models.models(options.tiny, Path(options.work))
    ids, size = random_models.vocabulary(actor), sizes.size(actor, "lm")
    lm = load_causal_lm(actor, random_models.dtype(), ids).to(device)
    width = next(lm.parameters()).element_size()
    bandwidth = read_rate(torch.ones(2**20 if options.tiny else 2**30, device=device))
    results.add(read_gb_per_s=bandwidth / 1e9, model=Path(actor).name, dtype=str(random_models.dtype()))
    backend, (prompt, response) = open_backend("loop", eos_token_id=inputs.NO_TOKEN, pad_token_id=0), options.lengths

    def sample(rows: int, length: int) -> Tensor:
        draws = uniforms([(0, i) for i in range(rows)], length)
        prompts = random_models.prompts(rows, prompt, ids)
        tokens: Tensor = backend(lm, prompts, SamplingOptions(response_length=length), draws).response_ids
        return tokens

    eager: dict[int, Tensor] = {}
    for name in ("eager",) if options.tiny else ("eager", "compiled"):
        if name == "compiled":
            kernels.compile_layers(lm)
        for rows in (2,) if options.tiny else (16, 64):
            whole = median(lambda rows=rows: sample(rows, response), options, 3)  # type: ignore[misc]
            first = median(lambda rows=rows: sample(rows, 1), options, 3)  # type: ignore[misc]
            step = (whole - first) / (response - 1)
            read = width * ((size.total - size.outer) + size.vocabulary * size.hidden)
            read += width * size.cache * rows * (prompt + response / 2)
            same = (sample(rows, response) == eager.setdefault(rows, sample(rows, response))).float().mean().item()
            results.add(**{f"{name}_{rows}_step_ms": 1e3 * step, f"{name}_{rows}_share": read / bandwidth / step,
                           f"{name}_{rows}_same_tokens": same})  # fmt: skip


def determinism(options: Options, results: Results) -> None:
    """Whether two backward passes of a packed micro-batch give the same bits, with `--deterministic` and without."""
    from rlhf.models.load import load_causal_lm
    from rlhf.models.policy import Policy
    from rlhf.types import Sequences

    actor, _ = random_models.models(options.tiny, Path(options.work))
    ids = random_models.vocabulary(actor)
    policy = Policy(load_causal_lm(actor, random_models.dtype(), ids)).to(local_device())
    rows, length = (2, 16) if options.tiny else (8, sum(options.lengths))
    mask = torch.ones(rows, length, dtype=torch.bool)
    batch: Any = Sequences(torch.randint(4, ids, (rows, length)), mask, mask & (torch.arange(length) > 0))

    def gradients() -> list[Tensor]:
        policy.zero_grad()
        policy(batch)[0].mean().backward()
        return [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]

    for name in ("default", "deterministic"):
        torch.use_deterministic_algorithms(name == "deterministic", warn_only=True)
        same = all(torch.equal(one, other) for one, other in zip(gradients(), gradients(), strict=True))
        results.add(**{f"{name}_same_bits": same, f"{name}_ms": 1e3 * median(gradients, options)})
    torch.use_deterministic_algorithms(False)
