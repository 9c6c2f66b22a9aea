"""Time of a step from the given rates: arithmetic, memory reads in generation, bytes that ranks exchange or offload."""

import math
from dataclasses import dataclass

from rlhf.config.options import EngineOptions
from rlhf.plan import zero
from rlhf.plan.forecast import ModelSpec, RolloutWork, Workload, micro_batches
from rlhf.plan.machine import NODE, Machine
from rlhf.plan.sizes import Size
from rlhf.plan.zero import MASTER, RankLayout

HOST_LINK = 20e9
"""bytes per second between a device and CPU memory: about 0.6 of a PCIe 4.0 slot's 32e9, as pinned copies reach"""
ADAM_SECONDS = 1.4e-9
"""seconds per weight of PyTorch's Adam on the CPUs of a server (ZeRO-Offload, arXiv 2101.06840, table 4)"""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one optimizer step, or of one iteration with a rollout, on each device. Times are in seconds."""

    generate: float
    score: float
    train: float
    exchange: float
    """time of communication, as if it never overlapped with computation"""
    offload: float
    """time of copies from and to CPU memory, and of an optimizer there"""
    sent: float
    """bytes that a device sends"""
    tokens: int
    """tokens trained on, over all devices"""

    @property
    def seconds(self) -> float:
        return self.generate + self.score + self.train + self.exchange + self.offload

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part that takes any."""
        names = ("generate", "score", "train", "exchange", "offload")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def compute(self) -> float:
        return self.seconds - self.exchange


def forward_flops(size: Size, rows: float, tokens: float, predicted: float) -> float:
    """Operations of a forward pass: 2 per weight and token in the layers, 2 S^2 d per layer and row in causal
    attention, and 2 V d per predicted token in the head."""
    inner = size.total - size.outer
    attention = 2 * tokens**2 * size.hidden * size.layers
    return rows * (2 * inner * tokens + attention + 2 * size.vocabulary * size.hidden * predicted)


def training_flops(spec: ModelSpec, rows: float, tokens: int, predicted: int) -> float:
    """Operations of a forward and a backward pass. The backward pass costs two forward passes (one where an adapter
    freezes the weights); gradient checkpointing adds one more forward pass."""
    times = 3.0 if spec.adapter is None else 2.0
    if isinstance(spec.options, EngineOptions) and spec.options.gradient_checkpointing:
        times += 1.0
    return times * forward_flops(spec.size(), rows, tokens, predicted)


def cost(workload: Workload, machine: Machine) -> Cost:
    """The cost of an optimizer step, or of an iteration with a rollout."""
    rows, flops = workload.batch / machine.count, machine.flops(workload.b)
    tokens, predicted = workload.shape.tokens, workload.shape.predicted
    sides = workload.shape.rows / workload.micro_batch  # 2 sequences in a pair
    epochs = workload.rollout.epochs if workload.rollout else 1
    steps = epochs * (workload.rollout.minibatches if workload.rollout else 1)
    trained = workload.trained()
    train = sum(training_flops(spec, rows * sides * epochs, tokens, _head_columns(spec, predicted)) for spec in trained)
    layout = RankLayout(machine.count, machine.on_cpu, micro_batches(workload, machine.count))
    sent = offload = 0.0
    for spec in trained:
        assert isinstance(spec.options, EngineOptions)
        sent += steps * zero.bytes_sent(spec.size(), spec.options, workload.b, layout)
        offload += steps * _offload(spec.size(), spec.options, workload.b, layout)
    generate = score = 0.0
    if workload.rollout is not None:
        generate = _generation(workload, machine, rows)
        # The actor computes log-probs too; without a reference beside it, it is also its own one, its adapter off.
        alone = all(spec.role != "reference" for spec in workload.models)
        scoring = [spec for spec in workload.models if workload.rollout.rescores or spec.role != "actor"]
        scoring += [spec for spec in trained if spec.role == "actor" and alone]
        score = (
            sum(forward_flops(spec.size(), rows, tokens, _head_columns(spec, predicted)) for spec in scoring) / flops
        )
        passes = layout.micro_batches * workload.rollout.minibatches
        sent += sum(_gather_bytes(workload, machine, spec, passes) for spec in scoring)
        generated = _rollout_batches(workload.rollout, rows) * workload.rollout.response
        sent += _gather_bytes(workload, machine, workload.models[0], generated)
        offload += sum(_fetch_seconds(workload, machine, spec, passes) for spec in scoring)
        offload += _fetch_seconds(workload, machine, workload.models[0], generated)
    sequences = round(workload.batch * sides * tokens)
    return Cost(
        generate, score, train / flops, sent / machine.link, 0.0 if machine.on_cpu else offload, sent, sequences
    )


def _offload(size: Size, options: EngineOptions, b: int, layout: RankLayout) -> float:
    """Seconds that an optimizer step takes longer with offloading: copies, and the optimizer on the CPU.

    ZeRO-2 and 3 copy the fp32 gradients of each micro-batch, ZeRO-1 those of the step. Offloaded weights are copied for
    the forward and for the backward pass. The devices of a node share its CPU.
    """
    owned, share = size.trained / layout.ranks, size.total / layout.ranks
    seconds = 0.0
    if options.offload_optimizer:
        gradients = MASTER * owned * (layout.micro_batches if options.zero_stage != 1 else 1)
        seconds += (gradients + b * owned) / HOST_LINK + ADAM_SECONDS * owned * min(layout.ranks, NODE)
    if options.offload_param:
        seconds += 2 * b * share * layout.micro_batches / HOST_LINK
    return seconds


def _fetch_seconds(workload: Workload, machine: Machine, spec: ModelSpec, times: int) -> float:
    """Seconds to copy offloaded weights to the device: once, or in each of `times` forward passes."""
    options = spec.options
    if not (options.offload_param if isinstance(options, EngineOptions) else options.offload):
        return 0.0
    share = spec.size().total / (machine.count if options.zero_stage == 3 else 1)
    return workload.b * share * (times if options.gather_whole is False else 1) / HOST_LINK


def _gather_bytes(workload: Workload, machine: Machine, spec: ModelSpec, times: int) -> float:
    """Bytes that a device sends so that all devices have the weights: once, or in each of `times` forward passes."""
    if spec.options.zero_stage != 3:
        return 0.0
    gathered = workload.b * spec.size().total * (machine.count - 1) / machine.count
    return gathered * (times if spec.options.gather_whole is False else 1)


def _rollout_batches(rollout: RolloutWork, rows: float) -> int:
    """Number of batches of responses that a device generates one after the other."""
    return math.ceil(max(1, math.ceil(rows)) / rollout.rows)


def _head_columns(spec: ModelSpec, predicted: int) -> int:
    """Tokens of a row that go through a language-model head: none in a scalar model."""
    return predicted if spec.head == "lm" else 0


def _generation(workload: Workload, machine: Machine, rows: float) -> float:
    """Seconds to generate: for every token a device reads all weights and the cache, or is bound by arithmetic."""
    rollout, actor = workload.rollout, workload.models[0]
    assert rollout is not None and actor.role == "actor"
    size, flops = actor.size(), machine.flops(workload.b)
    batch = min(rollout.rows, max(1, math.ceil(rows)))
    length = rollout.prompt + rollout.response / 2
    read = workload.b * (size.total + size.cache * batch * length)
    arithmetic = batch * (2 * size.total + 4 * length * size.hidden * size.layers)
    token_seconds = max(read / machine.device.bandwidth, arithmetic / flops)
    prefill = forward_flops(size, rows, rollout.prompt, 1) / flops
    return prefill + _rollout_batches(rollout, rows) * rollout.response * token_seconds
