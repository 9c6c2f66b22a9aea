"""What DeepSpeed holds of one model on one device and beside it in CPU memory, under each ZeRO stage.

Formulas are those of DeepSpeed 0.19's runtime/zero/stage_1_and_2.py and stage3.py, and of AdamW; T weights are
trained of which a rank owns p = T / ranks, F are frozen, a number has b bytes in the compute dtype, and m = 4 bytes in
the master copy. docs/scaling.md has them as a table; benchmarks/memory.py compares them with what processes use.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf.config.options import EngineOptions, FrozenOptions, effective_stage
from rlhf.engine.training import BUCKET
from rlhf.plan.sizes import Size

MASTER = 4
"""bytes of a number in fp32: of master weights, of each of AdamW's two moments, and of sums of gradients"""
LIVE = 1_000_000_000
"""weights that ZeRO-3 lets stand whole during a pass: stage3_max_live_parameters"""
PREFETCH = 50_000_000
"""and those that it fetches ahead: stage3_prefetch_bucket_size"""
REUSE = 1_000_000_000
"""weights that ZeRO-3 lets pass between two uses of one that it keeps: stage3_max_reuse_distance"""
SUB_GROUP = 1_000_000_000
"""weights whose step ZeRO-3 takes at once: sub_group_size"""


class Bytes(NamedTuple):
    """Of one process: on its device, and in the CPU memory of the host."""

    device: float = 0.0
    host: float = 0.0

    def __add__(self, other: Any) -> "Bytes":
        return Bytes(self.device + other[0], self.host + other[1])

    @property
    def total(self) -> float:
        """Where the device is the CPU."""
        return self.device + self.host


NOTHING = Bytes()


@dataclass(frozen=True, slots=True)
class Site:
    """Where processes run, as far as the memory of one of them depends on it."""

    ranks: int = 1
    on_cpu: bool = False
    """memory that is allocated but never written takes no room there, and gloo copies what it reduces and scatters"""
    micro_batches: int = 1
    """forward and backward passes of one optimizer step on a device"""


@dataclass(frozen=True, slots=True)
class Held:
    """Of one model: what stays from step to step, and what the moments of a step add to it."""

    weights: Bytes
    gradients: Bytes
    """from the backward pass to the step"""
    optimizer: Bytes
    """master weights and Adam's moments"""
    buffers: Bytes = NOTHING
    """DeepSpeed's, from the first step on"""
    passing: Bytes = NOTHING
    """beside activations and gradients, in a forward and backward pass"""
    reducing: Bytes = NOTHING
    """gradients included, when ranks exchange them"""
    stepping: Bytes = NOTHING
    """gradients included, in the optimizer's step"""
    gathered: Bytes = NOTHING
    """weights made whole for generation and scoring"""
    starting: Bytes = NOTHING
    """in the place of all above, while the engine is made"""

    @property
    def kept(self) -> Bytes:
        """What stays while other models work."""
        return self.weights + self.optimizer + self.buffers


def held(size: Size, options: EngineOptions, b: int, site: Site) -> Held:
    """Memory of a trained model whose numbers have `b` bytes in the compute dtype."""
    stage = effective_stage(options, b, site.ranks)
    if stage == 0:
        return _stage_0(size, b, site)
    return _stage_3(size, options, b, site) if stage == 3 else _stage_1_and_2(size, options, b, site, stage)


def _stage_0(size: Size, b: int, site: Site) -> Held:
    t = size.trained
    summed = MASTER if site.micro_batches > 1 else b  # bytes of a gradient
    gradients = summed * t
    own = MASTER * t if b < MASTER else 0  # in fp32 the weights are their own master copy
    bucket = MASTER * min(t, BUCKET) if site.ranks > 1 else 0  # flattened
    return Held(
        weights=Bytes(b * size.total),
        gradients=Bytes(gradients),
        optimizer=Bytes(own + 2 * MASTER * t),
        reducing=Bytes(gradients + bucket),
        stepping=Bytes(gradients + (MASTER * size.largest if summed < MASTER else 0)),  # that of one weight in fp32
        starting=Bytes(b * size.total + own),
    )


def _stage_1_and_2(size: Size, options: EngineOptions, b: int, site: Site, stage: int) -> Held:
    if b == MASTER:
        return _stage_1_and_2_in_fp32(size, options, site, stage)
    if stage == 1 and options.dtype != "fp16" and not options.offload_optimizer:
        return _stage_1_in_bf16(size, b, site)
    t, p = size.trained, _share(size.trained, site.ranks)
    filled = min(t, BUCKET)
    # stage 1 sums whole gradients and copies them to the bucket in fp32; stage 2 sends each micro-batch's in b bytes,
    # flat and then in fp32, and sums those of its own weights, p of them
    copied = MASTER if stage == 1 else b
    exchanged = copied * 2 * filled + (MASTER * (t - filled) if stage == 1 else MASTER * filled) + MASTER * p
    off = options.offload_optimizer
    return Held(
        weights=Bytes(b * size.total),
        gradients=Bytes(MASTER * (t if stage == 1 else p)),
        optimizer=Bytes(0, 4 * MASTER * p) if off else Bytes(3 * MASTER * p),  # offloaded, fp32 gradients stay too
        buffers=Bytes(b * size.largest, b * (p + size.largest)) if off else NOTHING,
        passing=Bytes(0 if site.on_cpu else copied * filled),
        reducing=Bytes(exchanged),
        # offloaded, AdamW without fusion makes two temporary tensors; else the norm of the largest is taken in fp64
        stepping=Bytes(MASTER * p, 2 * MASTER * p) if off else Bytes(MASTER * p + 8 * min(size.largest, p)),
        starting=Bytes(b * size.total, (2 * MASTER + b) * p) if off else Bytes(b * size.total + 2 * MASTER * p),
    )


def _stage_1_in_bf16(size: Size, b: int, site: Site) -> Held:
    """DeepSpeed's bf16_optimizer.py, which keeps fp32 sums of all gradients from the start to the end."""
    t, p = size.trained, _share(size.trained, site.ranks)
    return Held(
        weights=Bytes(b * size.total),
        gradients=NOTHING,
        optimizer=Bytes(3 * MASTER * p),
        buffers=Bytes(MASTER * t),
        passing=Bytes(b * size.largest),
        reducing=Bytes(MASTER * min(t, BUCKET)),  # flattened
        starting=Bytes(b * size.total + MASTER * (p + t)),
    )


def _stage_1_and_2_in_fp32(size: Size, options: EngineOptions, site: Site, stage: int) -> Held:
    t, b = size.trained, MASTER
    p = _share(t, site.ranks)
    filled = min(t, BUCKET)
    flattened = filled if site.ranks > 1 else 0
    # stage 1 keeps every gradient until the last micro-batch; stage 2 those of its own weights, summed so far
    sums = t - filled if stage == 1 else (p if site.micro_batches > 1 else 0)
    kept = t if stage == 1 else p
    own = 0 if options.offload_optimizer else p  # gradients of the weights that the rank updates, copied together
    common = {
        "weights": Bytes(b * size.total),
        "passing": Bytes(0 if site.on_cpu else b * filled),
    }
    if not options.offload_optimizer:
        return Held(
            gradients=Bytes(b * kept),
            optimizer=Bytes(3 * b * p),
            reducing=Bytes(b * (filled + max(flattened, own) + sums)),
            # p and its flat copy; or the norm of the largest in fp64
            stepping=Bytes(b * p + max(b * p, 8 * min(size.largest, p))),
            starting=Bytes(b * size.total + 2 * b * p),
            **common,
        )
    # ZeRO-2 adds micro-batches up in CPU memory, ZeRO-1 on the device
    summed = b * p if stage == 2 and site.micro_batches > 1 else 0
    return Held(
        gradients=Bytes(b * (t if stage == 1 else 0), summed),
        optimizer=Bytes(0, 4 * b * p),  # the gradient of the master copy stays
        buffers=Bytes(b * size.largest, b * (p + size.largest) + summed),
        reducing=Bytes(b * (filled + flattened + (t - filled if stage == 1 else 0))),
        stepping=Bytes(0, 2 * b * p),  # AdamW without fusion makes two temporary tensors
        starting=Bytes(b * size.total, 3 * b * p),
        **common,
    )


def _stage_3(size: Size, options: EngineOptions, b: int, site: Site) -> Held:
    t, n = size.trained, size.total
    p, share = _share(t, site.ranks), _share(n, site.ranks)
    filled = min(t, BUCKET)
    together = min(p, math.ceil(SUB_GROUP / site.ranks))
    apart = site.ranks > 1 or options.offload_param  # one rank alone looks at its own part, which is all
    live = min(n, LIVE + PREFETCH) if apart else 0
    whole = (n if options.gather_whole else live) if apart else 0
    copies = 2 if site.on_cpu else 1
    weights, master, gradients = b * share, 3 * MASTER * p, MASTER * p
    bucket = Bytes(MASTER * filled)
    # the embeddings are whole until the pass has ended
    scattered = Bytes(MASTER * filled * copies + (b * size.largest if apart else 0))
    if not options.offload_optimizer:
        kept = {"gradients": Bytes(), "optimizer": Bytes(master), "buffers": bucket + Bytes(gradients)}
        kept |= {"stepping": Bytes(MASTER * together)}
    else:
        kept = {"gradients": Bytes(), "optimizer": Bytes(0, master + MASTER * p)}
        kept |= {"buffers": bucket + Bytes(0, gradients), "stepping": Bytes(0, 2 * MASTER * together)}
    place = Bytes(0, weights) if options.offload_param else Bytes(weights)
    first = Bytes(0, 2 * MASTER * p) if options.offload_optimizer else Bytes(2 * MASTER * p)
    return Held(
        weights=place,
        passing=Bytes(b * live),
        reducing=scattered,
        gathered=Bytes(b * whole),
        starting=place + first + Bytes(MASTER * min(t, SUB_GROUP)),
        **kept,
    )


def frozen(size: Size, options: FrozenOptions, b: int, ranks: int) -> Held:
    """Memory of a model that no step changes: whole on every device, or in parts on the ranks (ZeRO-3)."""
    sharded, offload = options.zero_stage == 3, options.offload
    weights = b * (_share(size.total, ranks) if sharded else size.total)
    live = sharded and options.gather_whole is False
    whole = Bytes(b * (min(size.total, LIVE + PREFETCH) if live else size.total))
    apart = offload or (sharded and ranks > 1)
    return Held(
        weights=Bytes(0, weights) if offload else Bytes(weights),
        gradients=Bytes(),
        optimizer=Bytes(),
        gathered=whole if apart else Bytes(),
        starting=Bytes(weights),
    )


def _share(count: int, ranks: int) -> int:
    return math.ceil(count / ranks)


def exchanged(size: Size, options: EngineOptions, b: int, site: Site) -> float:
    """Bytes that a device sends in one optimizer step (ZeRO, arXiv 1910.02054, section 7): gradients in fp32.

    An all-reduce is a reduce-scatter and an all-gather, each of (n - 1) / n of the bytes. DeepSpeed all-reduces the
    gradients under ZeRO-1 and 2 too, and then gathers the changed weights; ZeRO-2 and 3 do so after each micro-batch,
    and ZeRO-3 gathers the weights for each forward pass, and for the backward pass those between whose uses lie more
    than REUSE others: those of the first layers.
    """
    part, stage = (site.ranks - 1) / site.ranks, effective_stage(options, b, site.ranks)
    gradients = part * MASTER * size.trained
    if stage == 3:
        gathers = 2 - min(1, REUSE / 2 / size.total)
        return (gathers * part * b * size.total + gradients) * site.micro_batches
    weights = 0 if stage == 0 else part * b * size.trained
    return 2 * gradients * (site.micro_batches if stage == 2 else 1) + weights
