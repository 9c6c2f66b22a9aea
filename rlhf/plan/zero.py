"""Memory of one model under each ZeRO stage of DeepSpeed: on one device, and in CPU memory if it is offloaded.

The formulas follow DeepSpeed 0.19's runtime/zero/stage_1_and_2.py and stage3.py, and AdamW. t weights are trainable, of
which a rank owns p = t / ranks. A number has b bytes in the compute dtype, and 4 bytes in the master copy.
docs/scaling.md has the formulas as a table; benchmarks/memory.py compares them with the measured memory of processes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlhf.config.options import EngineOptions, FrozenOptions, effective_stage
from rlhf.engine.optimizers import require_whole
from rlhf.engine.training import BUCKET
from rlhf.plan.sizes import Size

MASTER = 4
"""bytes of a number in fp32: master weights, each of AdamW's two moments, sums of gradients"""
LIVE = 1_000_000_000
"""ZeRO-3: maximum number of weights that are gathered at one time (stage3_max_live_parameters)"""
PREFETCH = 50_000_000
"""ZeRO-3: number of weights gathered in advance (stage3_prefetch_bucket_size)"""
SUB_GROUP = 1_000_000_000
"""ZeRO-3: number of weights that the optimizer updates at one time (sub_group_size)"""
STEPPING = {"adamw": 0, "adamw_8bit": 20, "paged_adamw_8bit": 20, "muon": 10}
"""bytes of a number of the tensor that an optimizer's step updates, for the numbers between; 8-bit AdamW: on a CPU"""


class Bytes(NamedTuple):
    """Bytes of one process: on its device, and in the CPU memory of the host."""

    device: float = 0.0
    host: float = 0.0

    def __add__(self, other: Any) -> "Bytes":
        return Bytes(self.device + other[0], self.host + other[1])

    @property
    def total(self) -> float:
        """The bytes of a process whose device is the CPU."""
        return self.device + self.host


NOTHING = Bytes()


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How ranks share the work, as far as the memory of one process depends on it."""

    ranks: int = 1
    on_cpu: bool = False
    """on a CPU, memory that is allocated but never written is not counted, and gloo copies what it sends"""
    micro_batches: int = 1
    """forward and backward passes in one optimizer step on a device"""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model in one process: what stays from step to step, and what each part of a step adds."""

    weights: Bytes
    gradients: Bytes
    """between the backward pass and the optimizer step"""
    optimizer: Bytes
    """master weights and the optimizer's moments"""
    buffers: Bytes = NOTHING
    """DeepSpeed's buffers, allocated in the first step"""
    passing: Bytes = NOTHING
    """added in a forward and backward pass, beside activations and gradients"""
    reducing: Bytes = NOTHING
    """added while ranks exchange gradients, the gradients included"""
    stepping: Bytes = NOTHING
    """added in the optimizer step, the gradients included"""
    gathered: Bytes = NOTHING
    """weights gathered for generation and scoring"""
    starting: Bytes = NOTHING
    """while the engine is created, instead of all above"""

    @property
    def resident(self) -> Bytes:
        """Memory that stays allocated while other models work."""
        return self.weights + self.optimizer + self.buffers


def model_memory(size: Size, options: EngineOptions, b: int, layout: RankLayout) -> ModelMemory:
    """Memory of a trained model whose numbers have `b` bytes in the compute dtype.

    Raises: UserError for an optimizer that needs whole weights where they are sharded.
    """
    require_whole(options, b, layout.ranks)
    stage = effective_stage(options, b, layout.ranks)
    if stage == 3:
        return _stage_3(size, options, b, layout)
    memory = _stage_0(size, options, b, layout) if stage == 0 else _stage_1_and_2(size, options, b, layout, stage)
    return _with_dequantized(memory, size, b)


def _with_dequantized(memory: ModelMemory, size: Size, b: int) -> ModelMemory:
    """Each product dequantises its matrix: one at a time."""
    one = Bytes(b * size.largest_quantized)
    return replace(memory, passing=memory.passing + one, gathered=memory.gathered + one)


def _stage_0(size: Size, options: EngineOptions, b: int, layout: RankLayout) -> ModelMemory:
    t = size.trained
    summed = MASTER if layout.micro_batches > 1 else b  # bytes of a gradient
    gradients = summed * t
    own = MASTER * t if b < MASTER else 0  # in fp32 the weights are their own master copy
    bucket = MASTER * min(t, BUCKET) if layout.ranks > 1 else 0  # flattened
    return ModelMemory(
        weights=Bytes(size.weight_bytes(b)),
        gradients=Bytes(gradients),
        optimizer=Bytes(own + size.state_bytes),
        reducing=Bytes(gradients + bucket),
        # The gradient of one tensor at a time is converted to fp32.
        stepping=Bytes(gradients + (STEPPING[options.optim] + (MASTER if summed < MASTER else 0)) * size.largest),
        starting=Bytes(size.weight_bytes(b) + own),
    )


def _stage_1_and_2(size: Size, options: EngineOptions, b: int, layout: RankLayout, stage: int) -> ModelMemory:
    if b == MASTER:
        return _stage_1_and_2_in_fp32(size, options, layout, stage)
    if stage == 1 and options.dtype != "fp16" and not options.offload_optimizer:
        return _stage_1_in_bf16(size, b, layout)
    t, p = size.trained, _share(size.trained, layout.ranks)
    filled = min(t, BUCKET)
    # Stage 1 sums whole gradients and copies them to the bucket in fp32. Stage 2 sends the gradients of each
    # micro-batch in b bytes (a flat copy, then one in fp32), and sums those of the p weights that the rank owns.
    copied = MASTER if stage == 1 else b
    reduced = copied * 2 * filled + (MASTER * (t - filled) if stage == 1 else MASTER * filled) + MASTER * p
    offload = options.offload_optimizer
    return ModelMemory(
        weights=Bytes(size.weight_bytes(b)),
        gradients=Bytes(MASTER * (t if stage == 1 else p)),
        optimizer=Bytes(0, 4 * MASTER * p) if offload else Bytes(3 * MASTER * p),  # with fp32 gradients
        buffers=Bytes(b * size.largest, b * (p + size.largest)) if offload else NOTHING,
        passing=Bytes(0 if layout.on_cpu else copied * filled),
        reducing=Bytes(reduced),
        # Not offloaded: the norm of the largest tensor in fp64. torch's fused AdamW allocates nothing.
        stepping=Bytes(MASTER * p + (0 if offload else 8 * min(size.largest, p))),
        starting=Bytes(size.weight_bytes(b), (2 * MASTER + b) * p)
        if offload
        else Bytes(size.weight_bytes(b) + 2 * MASTER * p),
    )


def _stage_1_in_bf16(size: Size, b: int, layout: RankLayout) -> ModelMemory:
    """DeepSpeed's bf16_optimizer.py, which keeps fp32 sums of all gradients during the whole run."""
    t, p = size.trained, _share(size.trained, layout.ranks)
    return ModelMemory(
        weights=Bytes(size.weight_bytes(b)),
        gradients=NOTHING,
        optimizer=Bytes(3 * MASTER * p),
        buffers=Bytes(MASTER * t),
        passing=Bytes(b * size.largest),
        reducing=Bytes(MASTER * min(t, BUCKET)),  # flattened
        starting=Bytes(size.weight_bytes(b) + MASTER * (p + t)),
    )


def _stage_1_and_2_in_fp32(size: Size, options: EngineOptions, layout: RankLayout, stage: int) -> ModelMemory:
    t, b = size.trained, MASTER
    p = _share(t, layout.ranks)
    filled = min(t, BUCKET)
    flattened = filled if layout.ranks > 1 else 0
    # Stage 1 keeps every gradient until the last micro-batch; stage 2 keeps the sums for the rank's own weights.
    sums = t - filled if stage == 1 else (p if layout.micro_batches > 1 else 0)
    gradients = t if stage == 1 else p
    own = 0 if options.offload_optimizer else p  # a flat copy of the gradients of the rank's own weights
    common = {
        "weights": Bytes(size.weight_bytes(b)),
        "passing": Bytes(0 if layout.on_cpu else b * filled),
    }
    if not options.offload_optimizer:
        return ModelMemory(
            gradients=Bytes(b * gradients),
            optimizer=Bytes(3 * b * p),
            reducing=Bytes(b * (filled + max(flattened, own) + sums)),
            # p gradients and their flat copy, or the norm of the largest tensor in fp64
            stepping=Bytes(b * p + max(b * p, 8 * min(size.largest, p))),
            starting=Bytes(size.weight_bytes(b) + 2 * b * p),
            **common,
        )
    # ZeRO-2 sums the gradients of micro-batches in CPU memory, ZeRO-1 on the device.
    summed = b * p if stage == 2 and layout.micro_batches > 1 else 0
    return ModelMemory(
        gradients=Bytes(b * (t if stage == 1 else 0), summed),
        optimizer=Bytes(0, 4 * b * p),  # with the gradient of the master copy
        buffers=Bytes(b * size.largest, b * (p + size.largest) + summed),
        reducing=Bytes(b * (filled + flattened + (t - filled if stage == 1 else 0))),
        starting=Bytes(size.weight_bytes(b), 3 * b * p),
        **common,
    )


def _stage_3(size: Size, options: EngineOptions, b: int, layout: RankLayout) -> ModelMemory:
    t, n = size.trained, size.total
    p, share = _share(t, layout.ranks), _share(n, layout.ranks)
    filled = min(t, BUCKET)
    sub_group = min(p, math.ceil(SUB_GROUP / layout.ranks))
    partitioned = layout.ranks > 1 or options.offload_param  # a single rank owns all weights and gathers none
    live = min(n, LIVE + PREFETCH) if partitioned else 0
    gathered = (n if options.gather_whole else live) if partitioned else 0
    copies = 2 if layout.on_cpu else 1
    weights, master, gradients = b * share, 3 * MASTER * p, MASTER * p
    bucket = Bytes(MASTER * filled)
    # The embeddings stay gathered until the end of the pass.
    scattered = Bytes(MASTER * filled * copies + (b * size.largest if partitioned else 0))
    if not options.offload_optimizer:
        fields = {"gradients": Bytes(), "optimizer": Bytes(master), "buffers": bucket + Bytes(gradients)}
        fields |= {"stepping": Bytes(MASTER * sub_group)}
    else:
        fields = {"gradients": Bytes(), "optimizer": Bytes(0, master + MASTER * p)}
        fields |= {"buffers": bucket + Bytes(0, gradients)}
    own_weights = Bytes(0, weights) if options.offload_param else Bytes(weights)
    moments = Bytes(0, 2 * MASTER * p) if options.offload_optimizer else Bytes(2 * MASTER * p)
    return ModelMemory(
        weights=own_weights,
        passing=Bytes(b * live),
        reducing=scattered,
        gathered=Bytes(b * gathered),
        starting=own_weights + moments + Bytes(MASTER * min(t, SUB_GROUP)),
        **fields,
    )


def frozen_memory(size: Size, options: FrozenOptions, b: int, ranks: int) -> ModelMemory:
    """Memory of a model that is not trained: whole on every device, or partitioned over the ranks (ZeRO-3)."""
    sharded, offload = options.zero_stage == 3, options.offload
    weights = b * _share(size.total, ranks) if sharded else size.weight_bytes(b)
    by_layer = sharded and options.gather_whole is False
    gathered = Bytes(b * (min(size.total, LIVE + PREFETCH) if by_layer else size.total))
    partitioned = offload or (sharded and ranks > 1)
    memory = ModelMemory(
        weights=Bytes(0, weights) if offload else Bytes(weights),
        gradients=Bytes(),
        optimizer=Bytes(),
        gathered=gathered if partitioned else Bytes(),
        starting=Bytes(weights),
    )
    return _with_dequantized(memory, size, b)


def _share(count: int, ranks: int) -> int:
    return math.ceil(count / ranks)
