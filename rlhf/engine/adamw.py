"""AdamW with fp32 weights, moments and arithmetic for a model of any dtype, and its learning-rate schedule."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as update

from rlhf.config.options import OptimizerOptions
from rlhf.distributed.zero3 import full_shape

INVERSE_SQRT_TIMESCALE = 10_000
"""steps after which the schedule inverse_sqrt has fallen to 1 / sqrt(2), without warm-up"""
MASTER = "weight"
"""the key of the fp32 weight in the optimizer state of a narrower one"""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, fp32"""
Group = dict[str, Any]
"""a parameter group of a torch optimizer: its weights, and the options of their steps"""
OWN_RATE = "own_rate"
"""the key of a parameter group whose weights have a learning rate of their own"""


def decay_groups(weights: Mapping[str, Tensor], decay: float) -> list[Group]:
    """AdamW's parameter groups of weights by name: matrices decay; norms and biases do not, as in transformers.

    A bias may be a matrix too: gpt-oss has one row of it for each expert. So a bias is recognised by its name.
    """
    if decay == 0:
        return [{"params": list(weights.values()), "weight_decay": 0.0}]
    decays = {name: len(full_shape(w)) > 1 and not name.endswith("bias") for name, w in weights.items()}
    groups = [
        {"params": [w for name, w in weights.items() if decays[name] == decaying], "weight_decay": decay * decaying}
        for decaying in (True, False)
    ]
    return [group for group in groups if group["params"]]


def rate_groups(weights: Mapping[str, Tensor], decay: float, rates: Mapping[str, float]) -> list[Group]:
    """`decay_groups`, and after them a group for each weight in `rates` that has a learning rate of its own."""
    without_rate = {name: w for name, w in weights.items() if name not in rates}
    groups = decay_groups(without_rate, decay) if without_rate else []
    for name, rate in rates.items():
        groups += [{**group, "lr": rate, OWN_RATE: True} for group in decay_groups({name: weights[name]}, decay)]
    return groups


class MasterAdamW(torch.optim.AdamW):
    """AdamW (I. Loshchilov and F. Hutter, arXiv 1711.05101) with master weights (P. Micikevicius et al., 1710.03740).

    Several weights are updated by one kernel. Their gradients in fp32 together are no larger than the largest one.
    """

    scale = 1.0
    """factor on the gradients of the next step, so that clipping needs no extra pass"""

    def __init__(self, weights: Iterable[Any], **options: Any) -> None:
        """weights: tensors, or parameter groups as in torch"""
        super().__init__(list(weights), fused=True, **options)

    def master(self, weight: Tensor) -> Tensor:
        """The fp32 weight that steps change: `weight` itself, or a copy in the optimizer state, made at the first
        call."""
        if weight.dtype == torch.float32:
            return weight.detach()
        state = self.state[weight]
        if MASTER not in state:
            state[MASTER] = weight.detach().float()
        master: Tensor = state[MASTER]
        return master

    def sum_gradients_in(self, dtype: torch.dtype | None) -> None:
        """The dtype in which gradients are accumulated from now on; None = that of the weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad_dtype = dtype or weight.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch returns the loss
        """Update every weight that has a gradient. The gradients are scaled in place."""
        assert closure is None, "a closure is not supported"
        for group in self.param_groups:
            for weights in batches([weight for weight in group["params"] if weight.grad is not None]):
                gradients = [weight.grad.float() for weight in weights if weight.grad is not None]
                torch._foreach_mul_(gradients, self.scale)
                self.update(weights, gradients, group)
                rounded = [weight for weight in weights if MASTER in self.state[weight]]
                if rounded:
                    torch._foreach_copy_(rounded, [self.state[weight][MASTER] for weight in rounded])

    def update(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], group: Group) -> None:
        """One step of the master weights of `weights`. gradients: in fp32"""
        if not weights:
            return
        beta1, beta2 = group["betas"]
        for weight in weights:
            if "step" not in self.state[weight]:
                self.state[weight] |= initial_state(weight)
        states = [self.state[weight] for weight in weights]
        update(
            [self.master(weight) for weight in weights],
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def resume(self, weight: Tensor, group: Group, steps: float) -> None:
        """Make the state of a weight after `steps` steps, with moments that are still to be restored."""
        self.state[weight] |= initial_state(weight, steps)

    def unstep(self, weight: Tensor) -> None:
        """Make the state of a weight that has not had a gradient yet."""
        self.state[weight] = {name: value for name, value in self.state[weight].items() if name == MASTER}

    def moments(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors of the state of `weight` that a checkpoint has beside the master weight; none before a step."""
        state = self.state[weight]
        return {name: state[name] for name in MOMENTS if name in state}


def batches(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The weights in their order, as many at once as together have no more numbers than the largest one."""
    most = max((weight.numel() for weight in weights), default=0)
    batch: list[Tensor] = []
    numbers = 0
    for weight in weights:
        if batch and numbers + weight.numel() > most:
            yield batch
            batch, numbers = [], 0
        batch.append(weight)
        numbers += weight.numel()
    if batch:
        yield batch


def initial_state(weight: Tensor, steps: float = 0) -> dict[str, Tensor]:
    """AdamW's state of a weight after `steps` steps, its moments 0."""
    moments = {name: torch.zeros_like(weight, dtype=torch.float32) for name in MOMENTS}
    return {"step": torch.full((), float(steps), device=weight.device), **moments}


def schedule(options: OptimizerOptions, total_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate at each optimizer step, from 0: warm-up, then the named shape.

    The shapes are those of `transformers.get_scheduler`. Its warm-up begins at a rate of 0, so that its first step has
    no effect; this one begins at 1 / warm-up steps. Its `polynomial` ends at a rate of 1e-7, this one at 0.
    """
    o, shape = options, options.lr_scheduler_type
    warmup = 0 if shape == "constant" else warmup_steps(o, total_steps)
    timescale = warmup or INVERSE_SQRT_TIMESCALE

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        cycle = done if shape == "cosine" or done == 1 else o.lr_num_cycles * done % 1
        match shape:
            case "constant" | "constant_with_warmup":
                return 1.0
            case "linear":
                return 1 - done
            case "polynomial":
                return float((1 - done) ** o.lr_power)
            case "inverse_sqrt":
                return math.sqrt(timescale / (timescale + step - warmup))
            case "cosine" | "cosine_with_restarts":
                return 0.5 * (1 + math.cos(math.pi * cycle))

    return factor


def warmup_warning(options: OptimizerOptions, total_steps: int) -> str | None:
    """A line for the user if the warm-up is longer than the run, so that it never reaches its learning rate."""
    warmup = warmup_steps(options, total_steps)
    if warmup <= total_steps or options.lr_scheduler_type == "constant":
        return None
    return (
        f"warning: --warmup-steps {warmup} is more than the {total_steps} steps of this run, whose rate rises to "
        f"{total_steps / warmup:.0%} of --learning-rate only; lower it, or use --warmup-ratio"
    )


def warmup_steps(options: OptimizerOptions, total_steps: int) -> int:
    """Steps of the warm-up: as many as the options say, or their share of all steps."""
    if options.warmup_steps is not None:
        return options.warmup_steps
    return max(1, round(options.warmup_ratio * total_steps)) if options.warmup_ratio > 0 else 0
