"""Time of a step from the given rates: arithmetic, memory reads in generation, and bytes that ranks exchange."""

import math
from dataclasses import dataclass

from rlhf.config.options import EngineOptions
from rlhf.plan import zero
from rlhf.plan.forecast import Forecast, ModelForecast, micro_batches
from rlhf.plan.sizes import Size
from rlhf.plan.zero import RankLayout


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one optimizer step, or of one iteration with a rollout, on each device. Times are in seconds."""

    generate: float
    score: float
    train: float
    exchange: float
    """time of communication, as if it never overlapped with computation"""
    sent: float
    """bytes that a device sends"""
    tokens: int
    """tokens trained on, over all devices"""

    @property
    def seconds(self) -> float:
        return self.generate + self.score + self.train + self.exchange

    @property
    def compute(self) -> float:
        return self.seconds - self.exchange


def forward_flops(size: Size, rows: float, tokens: float, predicted: float) -> float:
    """Operations of a forward pass: 2 per weight and token in the layers, 2 S^2 d per layer and row in causal
    attention, and 2 V d per predicted token in the head."""
    inner = size.total - size.outer
    attention = 2 * tokens**2 * size.hidden * size.layers
    return rows * (2 * inner * tokens + attention + 2 * size.vocabulary * size.hidden * predicted)


def training_flops(model: ModelForecast, rows: float, tokens: int, predicted: int) -> float:
    """Operations of a forward and a backward pass. The backward pass costs two forward passes (one where an adapter
    freezes the weights); gradient checkpointing adds one more forward pass."""
    times = 3.0 if model.spec.adapter is None else 2.0
    if isinstance(model.spec.options, EngineOptions) and model.spec.options.gradient_checkpointing:
        times += 1.0
    return times * forward_flops(model.size, rows, tokens, predicted)


def cost(plan: Forecast) -> Cost:
    """The cost of an optimizer step, or of an iteration with a rollout."""
    workload, machine = plan.workload, plan.machine
    rows, flops = workload.batch / machine.count, machine.flops(workload.b)
    tokens, predicted = workload.shape.tokens, workload.shape.predicted
    sides = workload.shape.rows / workload.micro_batch  # 2 sequences in a pair
    epochs = workload.rollout.epochs if workload.rollout else 1
    steps = epochs * (workload.rollout.minibatches if workload.rollout else 1)
    trained = [model for model in plan.models if model.spec.trained]
    train = sum(
        training_flops(model, rows * sides * epochs, tokens, _head_columns(model, predicted)) for model in trained
    )
    layout = RankLayout(machine.count, machine.on_cpu, micro_batches(workload, machine.count))
    sent = 0.0
    for model in trained:
        assert isinstance(model.spec.options, EngineOptions)
        sent += steps * zero.bytes_sent(model.size, model.spec.options, workload.b, layout)
    generate = score = 0.0
    if workload.rollout is not None:
        generate = _generation(plan, rows)
        # The actor computes log-probs too; with an adapter it is also its own reference.
        scoring = [*plan.models, *(model for model in trained if model.spec.role == "actor" and model.spec.adapter)]
        score = (
            sum(forward_flops(model.size, rows, tokens, _head_columns(model, predicted)) for model in scoring) / flops
        )
        sent += sum(
            _gather_bytes(plan, model, layout.micro_batches * workload.rollout.minibatches) for model in scoring
        )
        sent += _gather_bytes(plan, plan.models[0], _rollout_batches(plan, rows) * workload.rollout.response)
    return Cost(generate, score, train / flops, sent / machine.link, sent, round(workload.batch * sides * tokens))


def _gather_bytes(plan: Forecast, model: ModelForecast, times: int) -> float:
    """Bytes that a device sends so that all devices have the weights: once, or in each of `times` forward passes."""
    if model.spec.options.zero_stage != 3:
        return 0.0
    gathered = plan.workload.b * model.size.total * (plan.machine.count - 1) / plan.machine.count
    return gathered * (times if model.spec.options.gather_whole is False else 1)


def _rollout_batches(plan: Forecast, rows: float) -> int:
    """Number of batches of responses that a device generates one after the other."""
    rollout = plan.workload.rollout
    assert rollout is not None
    return math.ceil(max(1, math.ceil(rows)) / rollout.rows)


def _head_columns(model: ModelForecast, predicted: int) -> int:
    """Tokens of a row that go through a language-model head: none in a scalar model."""
    return predicted if model.spec.head == "lm" else 0


def _generation(plan: Forecast, rows: float) -> float:
    """Seconds to generate: for every token a device reads all weights and the cache, or is bound by arithmetic."""
    workload, machine = plan.workload, plan.machine
    rollout, actor = workload.rollout, plan.models[0]
    assert rollout is not None and actor.spec.role == "actor"
    batch = min(rollout.rows, max(1, math.ceil(rows)))
    length = rollout.prompt + rollout.response / 2
    read = workload.b * (actor.size.total + actor.size.cache * batch * length)
    arithmetic = batch * (2 * actor.size.total + 4 * length * actor.size.hidden * actor.size.layers)
    token_seconds = max(read / machine.device.bandwidth, arithmetic / machine.flops(workload.b))
    prefill = forward_flops(actor.size, rows, rollout.prompt, 1) / machine.flops(workload.b)
    return prefill + _rollout_batches(plan, rows) * rollout.response * token_seconds
