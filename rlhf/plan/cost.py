"""Time of a step from stated rates: arithmetic, memory reads in generation, and what ranks send each other."""

import math
from dataclasses import dataclass

from rlhf.config.options import EngineOptions
from rlhf.plan import zero
from rlhf.plan.sizes import Size
from rlhf.plan.stage import Forecast, Line, micro_batches
from rlhf.plan.zero import Site


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one optimizer step, or one iteration with a rollout, on each device."""

    generate: float
    """seconds, as the rest"""
    score: float
    train: float
    exchange: float
    """of sending, as if none of it happened during computation"""
    sent: float
    """bytes that a device sends"""
    tokens: int
    """trained on, over all devices"""

    @property
    def seconds(self) -> float:
        return self.generate + self.score + self.train + self.exchange

    @property
    def compute(self) -> float:
        return self.seconds - self.exchange


def forward_flops(size: Size, rows: float, tokens: int, predicted: int) -> float:
    """Operations of a forward pass: 2 a weight and token in the layers, 2 S^2 d a layer and row in causal attention,
    and the head on the columns that are predicted."""
    inner = size.total - size.outer
    attention = 2 * tokens**2 * size.hidden * size.layers
    return rows * (2 * inner * tokens + attention + 2 * size.vocabulary * size.hidden * predicted)


def training_flops(line: Line, rows: float, tokens: int, predicted: int) -> float:
    """Forward, and backward at twice that (once, where the weights are frozen under an adapter), and once more forward
    with gradient checkpointing."""
    times = 3.0 if line.player.adapter is None else 2.0
    if isinstance(line.player.held, EngineOptions) and line.player.held.gradient_checkpointing:
        times += 1.0
    return times * forward_flops(line.size, rows, tokens, predicted)


def cost(plan: Forecast) -> Cost:
    """What an optimizer step, or an iteration with a rollout, takes."""
    needs, machine = plan.needs, plan.machine
    rows, flops = needs.batch / machine.count, machine.flops(needs.b)
    tokens, predicted = needs.passes.tokens, needs.passes.predicted
    sides = needs.passes.rows / needs.micro_batch  # 2 of a pair
    epochs = needs.rollout.epochs if needs.rollout else 1
    steps = epochs * (needs.rollout.minibatches if needs.rollout else 1)
    trained = [line for line in plan.lines if line.player.trained]
    train = sum(training_flops(line, rows * sides * epochs, tokens, _columns(line, predicted)) for line in trained)
    site = Site(machine.count, machine.on_cpu, micro_batches(needs, machine.count))
    sent = 0.0
    for line in trained:
        assert isinstance(line.player.held, EngineOptions)
        sent += steps * zero.exchanged(line.size, line.player.held, needs.b, site)
    generate = score = 0.0
    if needs.rollout is not None:
        generate = _generation(plan, rows)
        # the actor scores too, and with an adapter it is its own reference
        asked = [*plan.lines, *(line for line in trained if line.player.role == "actor" and line.player.adapter)]
        score = sum(forward_flops(line.size, rows, tokens, _columns(line, predicted)) for line in asked) / flops
        sent += sum(_gathered(plan, line, site.micro_batches * needs.rollout.minibatches) for line in asked)
        sent += _gathered(plan, plan.lines[0], _turns(plan, rows) * needs.rollout.response)
    return Cost(generate, score, train / flops, sent / machine.link, sent, round(needs.batch * sides * tokens))


def _gathered(plan: Forecast, line: Line, times: int) -> float:
    """Bytes that a device sends so that all have the weights: once, or in each of so many forward passes."""
    if line.player.held.zero_stage != 3:
        return 0.0
    whole = plan.needs.b * line.size.total * (plan.machine.count - 1) / plan.machine.count
    return whole * (times if line.player.held.gather_whole is False else 1)


def _turns(plan: Forecast, rows: float) -> int:
    """Batches of responses that a device generates one after the other."""
    rollout = plan.needs.rollout
    assert rollout is not None
    return math.ceil(max(1, math.ceil(rows)) / rollout.at_once)


def _columns(line: Line, predicted: int) -> int:
    return predicted if line.player.head == "lm" else 0


def _generation(plan: Forecast, rows: float) -> float:
    """Every token of a batch of responses reads all weights and the cache, or is bound by arithmetic."""
    needs, machine = plan.needs, plan.machine
    rollout, actor = needs.rollout, plan.lines[0]
    assert rollout is not None and actor.player.role == "actor"
    together = min(rollout.at_once, max(1, math.ceil(rows)))
    length = rollout.prompt + rollout.response / 2
    read = needs.b * (actor.size.total + actor.size.cache * together * length)
    arithmetic = together * (2 * actor.size.total + 4 * length * actor.size.hidden * actor.size.layers)
    each = max(read / machine.device.bandwidth, arithmetic / machine.flops(needs.b))
    prefill = forward_flops(actor.size, rows, rollout.prompt, 1) / machine.flops(needs.b)
    return prefill + _turns(plan, rows) * rollout.response * each
