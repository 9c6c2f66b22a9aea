"""A rough time of a step: its operations over one rate per device, times a factor for what the setting adds.

A plan knows neither the links nor the memory bandwidth of a machine, so it counts no bytes. The result says which of
two settings is likely to be faster, and whether a run takes minutes, hours or days.
"""

import math

from rlhf.config.options import EngineOptions
from rlhf.plan.forecast import ModelSpec, Workload
from rlhf.plan.machine import Machine
from rlhf.plan.sizes import Size

DECODING_ROWS = {"cpu": 20}
"""responses below which a token takes no less time: all weights are read for it. The rate (0.4 of the peak) times the
bytes of a weight, over twice the bandwidth of memory: 17 to 22 on a CPU"""
DECODING_ROWS_ON_GPUS = 64
"""the same by the data sheets: 61 for A100, 82 for H200, 118 for H100, 65 for a 4090"""
SHARDED, OFFLOADED, GATHERED = 1.3, 2.0, 10.0
"""how many times as long a step takes with ZeRO-3, with the optimizer or the weights in CPU memory, and with rollouts
whose every token gathers the weights: rules of thumb, between those of one node with fast links and of several nodes"""


def forward_flops(size: Size, rows: float, tokens: float, predicted: float) -> float:
    """Operations of a forward pass: 2 per weight and token in the layers, 2 S^2 d per layer and row in causal
    attention, and 2 V d per predicted token in the head."""
    inner = size.total - size.outer
    attention = 2 * tokens**2 * size.hidden * size.layers
    return rows * (2 * inner * tokens + attention + 2 * size.vocabulary * size.hidden * predicted)


def seconds(workload: Workload, machine: Machine) -> float:
    """Of an optimizer step, or of an iteration with a rollout."""
    rows, rollout, trained = workload.batch / machine.count, workload.rollout, workload.trained()
    sides = workload.shape.rows / workload.micro_batch  # 2 sequences in a pair
    epochs = rollout.epochs if rollout else 1
    flops = sum(_passes(spec) * _forward(workload, spec, rows * sides * epochs) for spec in trained)
    if rollout is not None:
        # The actor computes log-probs too; without a reference beside it, it is also its own one, its adapter off.
        alone = all(spec.role != "reference" for spec in workload.models)
        scoring = [spec for spec in workload.models if rollout.rescores or spec.role != "actor"]
        scoring += [spec for spec in trained if spec.role == "actor" and alone]
        flops += sum(_forward(workload, spec, rows) for spec in scoring) + _generation(workload, machine, rows)
    return slower(workload) * flops / machine.flops(workload.b)


def slower(workload: Workload) -> float:
    """How many times as long a step takes as without ZeRO-3 and offloading."""
    options = workload.trained()[0].options
    assert isinstance(options, EngineOptions)
    factor = SHARDED if options.zero_stage == 3 else 1.0
    factor *= OFFLOADED ** (options.offload_optimizer + options.offload_param)
    return factor * (GATHERED if workload.rollout and not options.gather_whole else 1.0)


def training_passes(spec: ModelSpec) -> float:
    """Forward passes that take as long as a forward and a backward pass: 3, or 2 where an adapter freezes the
    weights."""
    return 3.0 if spec.adapter is None else 2.0


def _passes(spec: ModelSpec) -> float:
    """The same with what gradient checkpointing computes again."""
    assert isinstance(spec.options, EngineOptions)
    return training_passes(spec) + spec.options.gradient_checkpointing


def _forward(workload: Workload, spec: ModelSpec, rows: float) -> float:
    predicted = workload.shape.predicted if spec.head == "lm" else 0
    return forward_flops(spec.size(), rows, workload.shape.tokens, predicted)


def _generation(workload: Workload, machine: Machine, rows: float) -> float:
    """Operations of prompts and responses; those of few responses count as those of DECODING_ROWS."""
    rollout, size = workload.rollout, workload.models[0].size()
    assert rollout is not None
    least = DECODING_ROWS.get(machine.device.kind, DECODING_ROWS_ON_GPUS)
    batches = math.ceil(max(1, math.ceil(rows)) / rollout.rows)
    length = rollout.prompt + rollout.response / 2
    token = 2 * size.total + 4 * length * size.hidden * size.layers
    decoded = max(rows, batches * least) * rollout.response * token
    return forward_flops(size, rows, rollout.prompt, 1) + decoded
