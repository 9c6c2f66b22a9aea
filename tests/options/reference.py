"""A language model, a scalar model and AdamW once more, in float64 and from their equations, for tests/options.

Nothing of rlhf is used here, nor of transformers: GPT-2's layer is that of Radford et al. 2019 (pre-norm attention and
MLP, tanh GELU), AdamW that of Loshchilov and Hutter 2019, the schedules those of docs. Rows are right-padded: a causal
model looks at nothing that stands after a token.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import layer_norm

Ids = Sequence[int]
Loss = Callable[["Network"], tuple[Tensor, dict[str, Tensor]]]


class Network:
    """Weights as one float64 vector, and what the model makes of rows of ids."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.vector = torch.cat([weight.double().flatten() for weight in weights.values()])

    def weights(self) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), self.vector.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def copy(self) -> "Network":
        return Network({name: weight.detach() for name, weight in self.weights().items()})

    def logprobs(self, rows: Sequence[Ids], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """log pi(token s | tokens before s) and the entropy of that distribution, [B, S] each, 0 at s = 0."""
        ids = padded(rows)
        log_p = (self._states(ids) @ self.weights()["wte.weight"].T / temperature).log_softmax(-1)[:, :-1]
        chosen = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
        nothing = torch.zeros(len(ids), 1, dtype=torch.float64)
        return torch.cat([nothing, chosen], 1), torch.cat([nothing, -(log_p.exp() * log_p).sum(-1)], 1)

    def distributions(self, rows: Sequence[Ids], temperature: float) -> Tensor:
        """pi(. | tokens up to s), [B, S, V]."""
        return (self._states(padded(rows)) @ self.weights()["wte.weight"].T / temperature).softmax(-1)

    def scalars(self, rows: Sequence[Ids], detached: bool = False) -> Tensor:
        """The head's number at every token, [B, S]; `detached`: with a gradient for the head alone."""
        states = self._states(padded(rows))
        return (states.detach() if detached else states) @ self.weights()["score.weight"][0]

    def scores(self, rows: Sequence[Ids]) -> Tensor:
        """The head's number at the last token of each row, [B]."""
        return self.scalars(rows)[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]

    def _states(self, ids: Tensor) -> Tensor:
        w, (size, length), heads = self.weights(), ids.shape, 2
        x = w["wte.weight"][ids] + w["wpe.weight"][:length]
        width = x.shape[-1]

        def linear(x: Tensor, name: str) -> Tensor:
            return x @ w[f"h.0.{name}.weight"] + w[f"h.0.{name}.bias"]

        def norm(x: Tensor, name: str) -> Tensor:
            return layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

        q, k, v = (
            part.view(size, length, heads, -1).transpose(1, 2)
            for part in linear(norm(x, "h.0.ln_1"), "attn.c_attn").split(width, -1)
        )
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        attention = (q @ k.mT / math.sqrt(width // heads)).masked_fill(later, -math.inf).softmax(-1)
        x = x + linear((attention @ v).transpose(1, 2).reshape(size, length, width), "attn.c_proj")
        inner = linear(norm(x, "h.0.ln_2"), "mlp.c_fc")
        gelu = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        return norm(x + linear(gelu, "mlp.c_proj"), "ln_f")


def padded(rows: Sequence[Ids]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows])


def load(folder: str) -> Network:
    """The model that a directory holds, with its head if it has one."""
    return Network({name.removeprefix("transformer."): weight for name, weight in read(folder).items()})


@functools.cache
def read(folder: str) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def with_new_head(network: Network, seed: int) -> Network:
    """Under a head drawn from N(0, 1 / sqrt(d + 1)) by `seed` (Stiennon et al. 2020)."""
    width = network.shapes["ln_f.weight"][0]
    head = torch.empty(1, width).normal_(0.0, (width + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
    return Network({**network.weights(), "score.weight": head})


class Trainer:
    """AdamW on a network, with clipping and a schedule. `o`: the options by name."""

    def __init__(
        self, network: Network, o: dict[str, Any], rate: float, steps: int, rate_of_head: float | None = None
    ) -> None:
        self.network, self.o, self.rate, self.steps, self.step = network, o, rate, steps, 0
        self.rate_of_head = rate_of_head
        self.left_out = 0  # steps of the schedule that were not taken
        own = {"score.weight": rate if rate_of_head is None else rate_of_head}
        self.rates = torch.cat(
            [torch.full((shape.numel(),), own.get(name, rate)).double() for name, shape in network.shapes.items()]
        )
        self.first, self.second, self.taken = (torch.zeros_like(network.vector) for _ in range(3))
        self.of_head = torch.cat([torch.full((n.numel(),), float(k in own)) for k, n in network.shapes.items()]).bool()
        sizes = [torch.full((shape.numel(),), float(len(shape) > 1)) for shape in network.shapes.values()]
        self.decay = o["weight_decay"] * torch.cat(sizes)  # of matrices, not of norms and biases

    def factor(self, step: int) -> float:
        """Of the learning rate, at this step, from 0."""
        o, kind = self.o, self.o["lr_scheduler_type"]
        ratio = o["warmup_ratio"] if kind != "constant" else 0
        rising = max(1, round(ratio * self.steps)) if ratio else 0
        if o["warmup_steps"] is not None and kind != "constant":
            rising = o["warmup_steps"]
        if step < rising:
            return (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        cycle = math.fmod(done * o["lr_num_cycles"], 1.0)
        return {
            "constant": 1.0,
            "constant_with_warmup": 1.0,
            "linear": 1 - done,
            "cosine": math.cos(math.pi * done / 2) ** 2,
            "cosine_with_restarts": math.cos(math.pi * cycle / 2) ** 2,
            "polynomial": math.pow(1 - done, o["lr_power"]),
            "inverse_sqrt": (1 + (step - rising) / (rising or 10_000)) ** -0.5,
        }[kind]

    def take_step(self, loss: Loss, head_alone: bool = False) -> dict[str, float]:
        """One optimizer step: the metrics of the loss, the norm of its gradient, the learning rate.

        head_alone: the other weights stay as they are, and count no step
        """
        o, network = self.o, self.network
        network.vector = network.vector.detach().requires_grad_()
        value, metrics = loss(network)
        (gradient,) = torch.autograd.grad(value, network.vector)
        norm, factor = gradient.norm().item(), self.factor(self.step + self.left_out)
        if o["max_grad_norm"]:
            gradient = gradient * min(1.0, o["max_grad_norm"] / (norm + 1e-6))
        self.step += 1
        beta1, beta2 = o["adam_beta1"], o["adam_beta2"]
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient**2
        moving = self.of_head if head_alone else torch.ones_like(self.of_head)
        self.taken += moving
        taken = self.taken.clamp(min=1)
        mean, square = self.first / (1 - beta1**taken), self.second / (1 - beta2**taken)
        vector = network.vector.detach()
        rates = moving * self.rates * self.factor(self.step - 1 + self.left_out)
        network.vector = vector - rates * (self.decay * vector + mean / (square.sqrt() + o["adam_epsilon"]))
        numbers = {name: metric.item() for name, metric in metrics.items()}
        numbers |= {"loss": value.item(), "grad_norm": norm, "learning_rate": self.rate * factor}
        if self.rate_of_head is not None:
            numbers["learning_rate" if head_alone else "learning_rate_of_head"] = self.rate_of_head * factor
        return numbers
