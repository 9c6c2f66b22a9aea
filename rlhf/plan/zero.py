"""Memory of one model under each ZeRO stage of DeepSpeed: on one device, and in CPU memory if it is offloaded.

The formulas follow DeepSpeed 0.19's runtime/zero/stage_1_and_2.py and stage3.py, and AdamW. t weights are trainable, of
which a rank owns p = t / ranks. A number has b bytes in the compute dtype, and 4 bytes in the master copy.
docs/scaling.md has the formulas as a table; benchmarks/memory.py compares them with the measured memory of processes.
"""

import math
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one process: on its device, and in the CPU memory of the host."""

    device: float = 0.0
    host: float = 0.0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host)

    @property
    def total(self) -> float:
        """The bytes of a process whose device is the CPU."""
        return self.device + self.host


NOTHING = Bytes()


def held(count: float, offload: bool) -> Bytes:
    """Bytes that lie on the device, or offloaded in CPU memory."""
    return Bytes(host=count) if offload else Bytes(count)


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
    gradients: Bytes = NOTHING
    """between the backward pass and the optimizer step"""
    optimizer: Bytes = NOTHING
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
    return _stage_0(size, options, b, layout) if stage == 0 else _stage_1_and_2(size, options, b, layout, stage)


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
    )


def _stage_1_and_2(size: Size, options: EngineOptions, b: int, layout: RankLayout, stage: int) -> ModelMemory:
    offload, fp32, t = options.offload_optimizer, b == MASTER, size.trained
    if stage == 1 and not fp32 and options.dtype != "fp16" and not offload:
        return _stage_1_in_bf16(size, b, layout)
    p, filled = _share(t, layout.ranks), min(t, BUCKET)
    copied = MASTER if stage == 1 else b
    summed = MASTER * p if stage == 2 and fp32 and offload and layout.micro_batches > 1 else 0  # in CPU memory
    if fp32:
        # The bucket, and its flat copy or that of the gradients of the rank's own weights. Stage 1 keeps every gradient
        # until the last micro-batch; stage 2 keeps the sums for the rank's own weights.
        flat = max(filled if layout.ranks > 1 else 0, 0 if offload else p)
        earlier = t - filled if stage == 1 else (p if layout.micro_batches > 1 and not offload else 0)
        reducing = MASTER * (filled + flat + earlier)
        stepping = 0 if offload else 2 * MASTER * p  # torch's AdamW allocates nothing
    else:
        # Stage 1 sums whole gradients and copies them to the bucket in fp32. Stage 2 sends the gradients of each
        # micro-batch in b bytes (a flat copy, then one in fp32), and sums those of the p weights that the rank owns.
        reducing = copied * 2 * filled + MASTER * (p + (t - filled if stage == 1 else filled))
        stepping = MASTER * p
    gradients = t if stage == 1 else (0 if fp32 and offload else p)
    return ModelMemory(
        weights=Bytes(size.weight_bytes(b)),
        gradients=Bytes(MASTER * gradients, summed),
        optimizer=held((4 if offload else 3) * MASTER * p, offload),  # offloaded: with fp32 gradients
        buffers=Bytes(b * size.largest, b * (p + size.largest) + summed) if offload else NOTHING,
        passing=Bytes(0 if layout.on_cpu else copied * filled),
        reducing=Bytes(reducing),
        stepping=Bytes(stepping),
    )


def _stage_1_in_bf16(size: Size, b: int, layout: RankLayout) -> ModelMemory:
    """DeepSpeed's bf16_optimizer.py, which keeps fp32 sums of all gradients during the whole run."""
    t, p = size.trained, _share(size.trained, layout.ranks)
    return ModelMemory(
        weights=Bytes(size.weight_bytes(b)),
        optimizer=Bytes(3 * MASTER * p),
        buffers=Bytes(MASTER * t),
        passing=Bytes(b * size.largest),
        reducing=Bytes(MASTER * min(t, BUCKET)),  # flattened
    )


def _stage_3(size: Size, options: EngineOptions, b: int, layout: RankLayout) -> ModelMemory:
    t, n, offload = size.trained, size.total, options.offload_optimizer
    p, filled = _share(t, layout.ranks), min(t, BUCKET)
    partitioned = layout.ranks > 1 or options.offload_param  # a single rank owns all weights and gathers none
    live = min(n, LIVE + PREFETCH) if partitioned else 0
    gathered = n if partitioned and options.gather_whole else live
    weights = held(b * _share(n, layout.ranks), options.offload_param)
    return ModelMemory(
        weights=weights,
        optimizer=held((4 if offload else 3) * MASTER * p, offload),
        buffers=Bytes(MASTER * filled) + held(MASTER * p, offload),  # the bucket, and the rank's own gradients
        passing=Bytes(b * live),
        # The embeddings stay gathered until the end of the pass.
        reducing=Bytes(MASTER * filled * (2 if layout.on_cpu else 1) + (b * size.largest if partitioned else 0)),
        stepping=Bytes(0 if offload else MASTER * min(p, math.ceil(SUB_GROUP / layout.ranks))),
        gathered=Bytes(b * gathered),
    )


def frozen_memory(size: Size, options: FrozenOptions, b: int, ranks: int) -> ModelMemory:
    """Memory of a model that is not trained: whole on every device, or partitioned over the ranks (ZeRO-3)."""
    sharded = options.zero_stage == 3
    weights = b * _share(size.total, ranks) if sharded else size.weight_bytes(b)
    by_layer = sharded and options.gather_whole is False
    gathered = b * (min(size.total, LIVE + PREFETCH) if by_layer else size.total)
    return ModelMemory(
        weights=held(weights, options.offload),
        gathered=Bytes(gathered if options.offload or (sharded and ranks > 1) else 0),
    )


def _share(count: int, ranks: int) -> int:
    return math.ceil(count / ranks)
