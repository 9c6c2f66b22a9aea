"""Short training runs of one tiny model, the same for one process and for two."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import adapters, plugins
from rlhf.config.options import EngineOptions, OptimizerOptions, SamplingOptions
from rlhf.distributed import collectives
from rlhf.engine.ema import EMA
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.models import sequence_parallel
from rlhf.models.head import ScoreHead
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel, scores
from rlhf.types import Sequences, length_groups
from tests.support import tiny

ALONE = (0, 3)
"""ZeRO stages that differ in one process: 1 and 2 are 0 there, unless the optimizer is offloaded."""
STEPS = 4
RATES = [0.0005, 0.001, 0.001, 0.0005]
"""By hand: 0.45 of 4 steps is, rounded, 2 of warm-up to 0.001, then 2 down to 0."""
OPTIMIZER = OptimizerOptions(
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    warmup_ratio=0.45,
    weight_decay=0.1,
    max_grad_norm=0.5,
    adam_beta1=0.8,
    adam_beta2=0.9,
    adam_epsilon=1e-3,
)
"""No option has its default, so that one that does not arrive changes weights. AdamW's epsilon is as large as gradients
are: that of attention's key biases is 0 in real numbers (softmax does not change when all scores grow by the same) and
rounding in fp32, about 1e-10. With an epsilon of 1e-8 rounding would make steps of 1 % of the learning rate."""
EPS = torch.finfo(torch.float32).eps
ROUNDING = 1.1 * STEPS * EPS + sum(RATES) * 8 * EPS * 0.5 / 1e-3
"""2.0e-6: how far apart two orders of additions leave weights. Each step rounds weights, of which those of norms are up
to 1.1, and moves each by at most rate / epsilon times the change of its gradient: some eps (8 here) of the norm of all,
which is clipped to 0.5. Beside float64, 0.3e-6 was measured with AVX2 and AVX-512, one thread and two (2026-11-23)."""


BF16_WEIGHT = 2**-7
"""The distance of neighbours in bf16 from 1 to 2, as weights of norms are: how far apart one is that two runs, whose
gradients are rounded apart, round the other way."""
BF16_LOSS = 2**-8
"""What rounding takes off a logit below 2 in bf16, as all are here; the mean of log-probs of many tokens less."""


def start() -> PreTrainedModel:
    return tiny.causal_lm(std=0.05)


def batches(count: int = STEPS) -> list[Sequences]:
    """Of 8 rows with 5 to 20 tokens, of which the first 2 do not count."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 20, (count, 8), generator=draw)
    return [tiny.sequences(lengths[i].tolist(), [2] * 8, width=20, seed=i) for i in range(count)]


def micro_batches(rows: Sequences, size: int) -> list[Sequences]:
    return [rows[index].trimmed() for index in length_groups(rows.lengths, size)]


def engine(
    options: dict[str, Any],
    optimizer: OptimizerOptions = OPTIMIZER,
    adapter: str | None = None,
    model: PreTrainedModel | None = None,
) -> Engine:
    """model: by default that of `start`"""
    chosen = EngineOptions(**{"dtype": "fp32", **options})
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.dtype]
    torch.manual_seed(0)  # of the adapter's first weights
    lm = adapters.wrap((model or start()).to(dtype), adapter)
    return Engine(
        sequence_parallel.policy(lm, chosen.sequence_parallel_size), tiny.training_options(chosen, optimizer), STEPS
    )


def step(trained: Engine, rows: Sequences, size: int = 8) -> dict[str, float]:
    """One step on this rank's share of `rows`, in micro-batches of at most `size`."""
    mine = rows[torch.arange(collectives.dp_rank(), len(rows), collectives.dp_size())]
    count = collectives.sum_over_ranks(mine.loss_mask.sum())
    return trained.step(
        micro_batches(mine, size), lambda micro: losses.token_nll(trained(micro)[0], micro.loss_mask, count)
    )


def weights(trained: Engine) -> dict[str, Tensor]:
    """Copies of the whole weights, by name."""
    with trained.inference() as model:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def run(options: dict[str, Any], size: int = 8, adapter: str | None = None, generating: bool = False) -> dict[str, Any]:
    """STEPS steps: their metrics, and the last weights. `generating` samples before each, ranks of unequal length."""
    trained = engine(options, adapter=adapter)
    metrics, tokens = [], []
    for rows in batches():
        if generating:
            tokens.append(generate(trained, 3 + 8 * collectives.rank()))
        metrics.append(step(trained, rows, size))
    return {"metrics": metrics, "weights": weights(trained), "tokens": tokens}


ROWS = tiny.sequences([5, 8, 6, 7] * 8, [2] * 32, seed=11)
UNCLIPPED = OPTIMIZER.model_copy(update={"max_grad_norm": 0.0})


def accumulated(options: dict[str, Any]) -> dict[str, Tensor]:
    """The gradient of a bf16 step on ROWS with a micro-batch for each: AdamW's first moment after it is 1 - beta1 of
    it."""
    trained = engine({"dtype": "bf16", **options}, UNCLIPPED)
    step(trained, ROWS, 1)
    moments = {name: value for name, value in gathered(trained).items() if name.startswith("exp_avg:")}
    return {name.split(":")[1]: value.double() / (1 - UNCLIPPED.adam_beta1) for name, value in moments.items()}


def added_up() -> tuple[dict[str, Tensor], float]:
    """The same from passes of a plain model, added up in fp64; and the most that a sum in fp32 may be off.

    A sum of n numbers, in any order, is off by less than n eps times the sum of their sizes.
    """
    model, sums, sizes = Policy(start().to(torch.bfloat16)), dict[str, Tensor](), 0.0
    for row in micro_batches(ROWS, 1):
        model.zero_grad()
        losses.token_nll(model(row)[0], row.loss_mask, ROWS.loss_mask.sum())[0].backward()
        gradients = {name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None}
        sums = {name: sums.get(name, 0) + gradient for name, gradient in gradients.items()}
        sizes += norm(gradients)
    return sums, len(ROWS) * EPS * sizes


def norm(tensors: dict[str, Tensor]) -> float:
    """Of all together."""
    return math.sqrt(sum(float(value.square().sum()) for value in tensors.values()))


SCORE_HEAD = 3.0 * torch.randn(1, tiny.WIDTH, generator=torch.Generator().manual_seed(7))
"""Of scores up to about 40."""


def scored_in_bf16(options: dict[str, Any]) -> dict[str, Tensor]:
    """Two steps of a scalar model in bf16: its head's fp32 weight before (`first`) and after them (`weight`), and what
    then went into the head and came out (`states`, `scores`), in training and in inference."""
    model = ScalarModel(tiny.backbone(std=0.05).to(torch.bfloat16), ScoreHead(SCORE_HEAD, torch.bfloat16))
    trained = Engine(model, tiny.training_options(EngineOptions(**{"dtype": "bf16", **options}), OPTIMIZER), STEPS)
    first, rows = master(trained)["score.weight"], batches(1)[0]
    for _ in range(2):
        trained.step([rows], lambda micro: (-scores(trained(micro), micro.mask).mean() / collectives.world_size(), {}))
    passes: list[tuple[Tensor, Tensor]] = []
    hook = trained.module.score.register_forward_hook(
        lambda _, inputs, outputs: passes.append((inputs[0].detach().flatten(0, -2), outputs.detach().flatten()))
    )
    trained(rows)
    with trained.inference() as inside:
        inside(rows)
    hook.remove()
    states, outputs = (torch.cat(each) for each in zip(*passes, strict=True))
    return {"first": first, "weight": master(trained)["score.weight"], "states": states, "scores": outputs}


def gathered(part: Any) -> dict[str, Tensor]:
    """The tensors that all ranks keep, as a checkpoint brings them back."""
    mine = {name: tensor.clone() for name, tensor in part.tensors()}
    return {name: tensor for share in collectives.gather_objects(mine) for name, tensor in share.items()}


def generate(trained: Engine, length: int) -> Tensor:
    with trained.inference() as policy:
        return sample(policy, length)


def sample(policy: Policy, length: int) -> Tensor:
    config = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
    backend = plugins.build("rlhf.generation", {"name": "loop", **config})
    rollout = backend(policy.lm, tiny.prompts([3, 9, 8]), SamplingOptions(response_length=length), None)
    return rollout.response_ids[:, :3]


def run_into_nan(options: dict[str, Any], bad_rank: int) -> dict[str, Any]:
    """A good step, one of which a number is NaN on `bad_rank` but no gradient, a good one, then losses of NaN until the
    run ends.

    Of each rank: the metrics of the step left out, whether it changed the weights, whether the good step after it came
    out as without it, what ended the run after how many, and a checksum of the weights.
    """
    trained, undisturbed = engine(options), engine(options)
    first, second, third = batches(3)
    for each in (trained, undisturbed):
        step(each, first)
    before = weights(trained)
    metrics = bad_step(trained, second, bad_rank, traceless=True)
    unchanged = equal(before, weights(trained))
    for each in (trained, undisturbed):
        step(each, third)
    as_without = equal(weights(undisturbed), weights(trained))
    before, message, left_out = weights(trained), "", 0
    while not message:
        try:
            bad_step(trained, second, bad_rank)
            left_out += 1
        except NonFiniteError as error:
            message = str(error)
    unchanged = unchanged and equal(before, weights(trained))
    checksum = sum(value.double().sum().item() for value in before.values())
    return {"ranks": collectives.gather_objects((metrics, unchanged, as_without, message, left_out, checksum))}


def bad_step(trained: Engine, rows: Sequences, bad_rank: int, traceless: bool = False) -> dict[str, float]:
    """The loss of the last micro-batch is NaN, or (`traceless`) a metric beside it."""
    poison = torch.tensor(float("nan") if collectives.rank() == bad_rank else 1.0)
    numbers = torch.arange(collectives.rank(), 8, collectives.world_size())
    mine = micro_batches(rows[numbers], 3)

    def loss(micro: Sequences) -> losses.Loss:
        value, metrics = losses.token_nll(trained(micro)[0], micro.loss_mask, 100)
        spoilt = poison if micro is mine[-1] else 1.0
        return (value, metrics | {"nll": metrics["nll"] * spoilt}) if traceless else (value * spoilt, metrics)

    parts = length_groups(rows[numbers].lengths, 3)
    return trained.step(mine, loss, [numbers[part].tolist() for part in parts])


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


DECAY = 0.7


def run_averaged(options: dict[str, Any], adapter: str | None = None) -> dict[str, Any]:
    """STEPS steps with an average of the weights: the weights it saw, what came out, and the weights after that."""
    trained = engine(options, adapter=adapter)
    average = EMA(trained, DECAY)
    trace = [master(trained)]
    for rows in batches():
        step(trained, rows)
        average.update()
        trace.append(master(trained))
    last = weights(trained)
    with trained.inference() as model, average.inside(model):
        averaged = {name: value.detach().float().clone() for name, value in model.named_parameters()}
    return {
        "trace": trace,
        "averaged": averaged,
        "undone": equal(last, weights(trained)),
        "state": dict(average.tensors()),
    }


def master(trained: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trained.fp32_weights()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The greatest difference of any weight."""
    assert set(one) == set(other)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def require_left_out(result: Any, rows: str) -> None:
    metrics, unchanged, as_without, message, left_out, _ = result
    assert metrics["skipped"] == 1 and set(metrics) == {"skipped", "learning_rate"}
    assert unchanged and as_without
    assert left_out == 4 and message.startswith(f"step 8: loss is nan (training rows {rows}), 5 times in a row;")
