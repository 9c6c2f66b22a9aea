"""The optimizer of a model: AdamW, or (`--optim`) one of a library for the weights that suit it, AdamW for the others.

Muon works on the rows and columns of a matrix, 8-bit AdamW on blocks of it. ZeRO 1 to 3 have flat shards, which are
none of these: both need whole weights.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config.options import EngineOptions, Optim, TrainingOptions, effective_stage
from rlhf.engine.adamw import Group, MasterAdamW, rate_groups
from rlhf.errors import UserError
from rlhf.models import quantized
from rlhf.models.head import ScoreHead

LEAST_8BIT = 4096
"""weights of a tensor below which bitsandbytes does not use 8 bits"""
BLOCK = 256
"""weights that share a scale in 8 bits"""
IN_8_BITS = ("adamw_8bit", "paged_adamw_8bit")
"""of bitsandbytes"""
CODES = ("qmap1", "qmap2")
"""in the state of bitsandbytes, the values of the 256 codes: constants"""


def outer_weights(model: nn.Module) -> set[int]:
    """The ids of the weights of embeddings and heads, whose rows belong to one token each.

    Muon is for the matrices between them (K. Jordan 2024). In 8 bits embeddings are less stable (arXiv 2110.02861,
    section 2.3), and transformers leaves them in 32 bits too.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding | ScoreHead)]
    heads = [part.get_output_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)]
    return {id(weight) for layer in [*layers, *heads] if layer is not None for weight in layer.parameters()}


def is_special(kind: Optim, shape: Iterable[int], outer: bool) -> bool:
    """Whether a weight gets the optimizer `kind` rather than AdamW. outer: one of `outer_weights`"""
    sizes = tuple(shape)
    if outer or kind == "adamw":
        return False
    return len(sizes) == 2 if kind == "muon" else math.prod(sizes) >= LEAST_8BIT


def state_numbers(kind: Optim, shape: Iterable[int], outer: bool) -> tuple[int, int]:
    """(fp32 numbers, 8-bit codes) in the state of a weight, beside its master weight."""
    sizes = tuple(shape)
    count = math.prod(sizes)
    if not is_special(kind, sizes, outer):
        return 2 * count, 0
    return (count, 0) if kind == "muon" else (2 * math.ceil(count / BLOCK), 2 * count)


def require_whole(options: EngineOptions, b: int, ranks: int) -> None:
    """Raises: UserError for an optimizer that needs whole weights where they are sharded.

    b: bytes of a number in the compute dtype
    """
    if options.optim == "adamw":
        return
    if effective_stage(options, b, ranks) > 0 or options.tensor_parallel_size > 1:
        offload = " and --offload-optimizer" if options.offload_optimizer else ""
        raise UserError(
            f"--optim {options.optim}: got --zero-stage {options.zero_stage}{offload} with {ranks} "
            f"process{'es' * (ranks > 1)}, expected whole weights on a device: one process with --zero-stage 0, 1 or 2 "
            "in fp32 or bf16, or several with --zero-stage 0 --dtype fp32; else use --optim adamw"
        )


def require_usable(options: EngineOptions, device: torch.device) -> None:
    """Raises: UserError without the package of the optimizer, or on a device for which the package does not have it."""
    if options.optim not in IN_8_BITS:
        return
    if options.optim == "paged_adamw_8bit" and device.type != "cuda":
        raise UserError(
            f"--optim paged_adamw_8bit: got the device {device.type}, expected a CUDA GPU, whose driver moves "
            "the pages; use --optim adamw_8bit"
        )
    quantized.require_installed(f"--optim {options.optim}")


def build(model: nn.Module, options: TrainingOptions, rates: Mapping[str, float], plain: bool) -> torch.optim.Optimizer:
    """The optimizer of the trained weights of a model.

    rates: learning rates of weights that have one of their own, by name
    plain: the weights are not sharded, so that ZeRO has no master weights of them
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    groups = rate_groups(trained, options.weight_decay, rates)
    settings: Any = {
        "lr": options.learning_rate,
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
    }
    if not plain:
        return torch.optim.AdamW(groups, **settings, fused=True)
    if options.optim == "adamw":
        return MasterAdamW(groups, **settings)
    return LibraryOptimizer(groups, options.optim, outer_weights(model), **settings)


class LibraryOptimizer(MasterAdamW):
    """The optimizer `kind` for the weights that suit it, AdamW for the others.

    Each weight has an object of the library's class, which updates its fp32 master weight: so the numbers are the
    library's.
    """

    def __init__(self, weights: Iterable[Any], kind: Optim, outer: set[int], **options: Any) -> None:
        """outer: ids of the weights of embeddings and heads"""
        super().__init__(weights, **options)
        self._kind, self._outer = kind, outer
        self._libraries: dict[Tensor, torch.optim.Optimizer] = {}

    def update(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], group: Group) -> None:
        """One step of the master weights of `weights`."""
        others = [i for i, weight in enumerate(weights) if not self._is_special(weight)]
        super().update([weights[i] for i in others], [gradients[i] for i in others], group)
        for weight, gradient in zip(weights, gradients, strict=True):
            if self._is_special(weight):
                state = self.state[weight]
                state["step"] = state.get("step", 0) + 1
                self._step(weight, gradient, group, group["lr"])

    def _step(self, weight: Tensor, gradient: Tensor, group: Group, rate: float) -> None:
        master = self.master(weight)
        if weight not in self._libraries:
            self._libraries[weight] = _library(self._kind, nn.Parameter(master), group)
        library = self._libraries[weight]
        own = library.param_groups[0]
        parameter = own["params"][0]
        own["lr"], parameter.data, parameter.grad = rate, master, gradient
        library.step()
        parameter.grad = None
        if parameter.data_ptr() != master.data_ptr():  # the library has made it contiguous
            master.copy_(parameter.detach())

    def resume(self, weight: Tensor, group: Group, steps: float) -> None:
        """A library makes its state in a step: one with a gradient and a rate of 0, which changes no weight."""
        if not self._is_special(weight):
            return super().resume(weight, group, steps)
        self._step(weight, torch.zeros_like(self.master(weight)), group, 0.0)
        self.state[weight]["step"] = steps
        own = self._state(weight)
        if "step" in own:
            own["step"] = int(steps)
        return None

    def unstep(self, weight: Tensor) -> None:
        """As of AdamW; the library's object of the weight goes too."""
        super().unstep(weight)
        self._libraries.pop(weight, None)

    def moments(self, weight: Tensor) -> dict[str, Tensor]:
        """As of AdamW, by the library's names."""
        if not self._is_special(weight):
            return super().moments(weight)
        state = self._state(weight) if weight in self._libraries else {}
        return {name: x for name, x in state.items() if isinstance(x, Tensor) and x.dim() and name not in CODES}

    def _is_special(self, weight: Tensor) -> bool:
        return is_special(self._kind, weight.shape, id(weight) in self._outer)

    def _state(self, weight: Tensor) -> dict[str, object]:
        """The library's state of one weight."""
        (state,) = self._libraries[weight].state.values()
        return state


def _library(kind: Optim, weight: nn.Parameter, group: Group) -> torch.optim.Optimizer:
    """Muon's update has the size of AdamW's (arXiv 2502.16982, section 2.2), so AdamW's rates and decay suit it."""
    if kind == "muon":
        decay = group["weight_decay"]
        return torch.optim.Muon([weight], lr=group["lr"], weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    from bitsandbytes.optim import AdamW  # an extra

    own = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer: torch.optim.Optimizer = AdamW([weight], **own, optim_bits=8, is_paged=kind == "paged_adamw_8bit")
    return optimizer
