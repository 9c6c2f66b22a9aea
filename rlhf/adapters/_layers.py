"""What peft lacks of some methods, each in a subclass of `PeftAdapter`. The methods' options are in `_table`."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import BOFTConfig
from peft.tuners.boft.layer import get_fbd_cuda
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter
from rlhf.config.options import EngineOptions
from rlhf.distributed.zero3 import full_shape, gather_weights
from rlhf.errors import UserError
from rlhf.models.adapter_files import ONLY, tuner_layers


class BOFT(PeftAdapter):
    """peft would silently use a single factor without its CUDA extension. It reads the elements of its permutations,
    which the plan's models of the meta device do not have."""

    def __init__(self, options: BOFTConfig, learning_rate: float) -> None:
        super().__init__(options, learning_rate)
        if options.boft_n_butterfly_factor > 1 and get_fbd_cuda() is None:
            raise UserError(
                f"adapter boft: got boft_n_butterfly_factor {options.boft_n_butterfly_factor}, expected 1: peft's CUDA "
                "extension cannot be built here (it needs a GPU, nvcc and ninja)"
            )

    @contextlib.contextmanager
    def gathered(self, model: PreTrainedModel) -> Iterator[None]:
        with torch.device("cpu"), super().gathered(model):
            yield


class HRA(PeftAdapter):
    """peft's pairs of reflections cancel up to rounding only, up to 0.07 nats in bf16. These cancel exactly."""

    @torch.no_grad()
    def wrap(self, model: PreTrainedModel) -> None:
        """Round each drawn vector u to one with the entries 0 and +-2^-j, of which m = 4^k are not 0.

        Then all numbers of I - 2 u u' / |u|^2 and of its square are sums of few powers of two. u keeps its largest
        entries, and nearly its length, on which the size of a step depends.
        """
        super().wrap(model)
        for _, layer in tuner_layers(model):
            vectors = layer.hra_u[ONLY]
            count = max(4**k for k in range(5) if 4**k <= len(vectors))
            largest = vectors.abs().topk(count, dim=0).indices
            size = (vectors.float().norm(dim=0) / count**0.5).log2().round().exp2().to(vectors)
            rounded = torch.zeros_like(vectors).scatter(0, largest, 1.0) * vectors.sign() * size
            vectors.copy_(rounded)


class LNTuning(PeftAdapter):
    """peft knows the names of the layers for few model types; here their class says it."""

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        options.target_modules = [name for name, _ in _norms(model)]
        return options

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """peft copies the layers."""
        return gather_weights([weight for _, norm in _norms(model) for weight in norm.parameters()])

    def merged_layer(self, layer: Any) -> dict[str, Tensor]:
        """The copy replaces the layer. Rows of new tokens are another method's."""
        if not hasattr(layer, "ln_tuning_layers"):
            return super().merged_layer(layer)
        trained = layer.ln_tuning_layers[layer.active_adapters[0]]
        return {name: weight.detach().cpu() for name, weight in trained.named_parameters()}


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The normalisation layers that have weights, by name."""
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None:
            yield name, module


class LoHa(PeftAdapter):
    """peft takes the sizes of the updates from the weights themselves."""

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError under ZeRO-3, and as every method of peft."""
        super().check(options)
        if options.zero_stage == 3:
            raise UserError("adapter loha: got --zero-stage 3, expected 0, 1 or 2: peft needs whole weights")


class SHiRA(PeftAdapter):
    """peft chooses the weights on the device of a layer, which the plan's models do not have."""

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        options.mask_fn = choose_weights  # its arguments are those that peft passes
        return options


def choose_weights(layer: Any, r: int, random_seed: int) -> Tensor:
    """A mask [outputs, inputs] of r (outputs + inputs) weights of a linear layer, by a seed; on the CPU."""
    rows, columns = layer.out_features, layer.in_features
    generator = torch.Generator("cpu").manual_seed(random_seed)
    chosen = torch.randperm(rows * columns, generator=generator, device="cpu")[: r * (rows + columns)]
    mask = torch.zeros(rows * columns, dtype=torch.bool, device="cpu")
    mask[chosen] = True
    return mask.view(rows, columns)


class TrainableTokens(PeftAdapter):
    """peft copies rows of the embeddings; those of sharded weights it would copy on CUDA only."""

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        embeddings: Any = model.get_input_embeddings()
        rows = full_shape(embeddings.weight)[0]
        wrong = [index for index in options.token_indices if not 0 <= index < rows]
        if wrong:
            raise UserError(f"adapter trainable_tokens: got the id {wrong[0]}, expected ids from 0 to {rows - 1}")
        return options

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        return gather_weights(model.get_input_embeddings().parameters())
