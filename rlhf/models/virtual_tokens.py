"""Learned embeddings before every row, by peft: prompt tuning and p-tuning.

A row begins with ids beyond the vocabulary, whose embeddings are peft's. So packed rows, positions, caches and kernels
see tokens like any others, and nothing else knows of them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.hub.untrusted import ADAPTER_WEIGHTS
from rlhf.types import Prompts, Sequences

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel  # importing it takes more than a second


class Embeddings(nn.Module):
    """The embedding layer of a model whose rows begin with N virtual tokens."""

    def __init__(self, layer: nn.Module, peft_model: "PeftModel") -> None:
        super().__init__()
        self.layer: Any = layer
        encoder: Any = peft_model.prompt_encoder["default"]
        self.encoder = encoder
        self.final = peft_model.active_peft_config.inference_mode  # p-tuning's MLP is not saved, but what it computed
        self.held = (peft_model,)  # in a tuple, as it has this model as a part
        self.ids = range(self.num_embeddings, self.num_embeddings + encoder.embedding.num_embeddings)

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.layer.weight
        return weight

    @property
    def num_embeddings(self) -> int:
        return int(self.layer.num_embeddings)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, d]"""
        number = ids - self.num_embeddings
        weight: Tensor = self.encoder.embedding.weight
        learned = weight if self.final else self.encoder(torch.arange(len(weight), device=ids.device)[None])[0]
        rows: Tensor = self.layer(ids.masked_fill(number >= 0, 0))
        return torch.where((number >= 0)[..., None], learned.to(rows.dtype)[number.clamp(min=0)], rows)


def attach(model: PreTrainedModel, options: "PeftConfig") -> Embeddings:
    """Freeze the weights of a language model, and put virtual tokens before its rows. options: of peft, which it
    completes"""
    from peft import get_peft_model

    peft_model: Any = get_peft_model(model, options, autocast_adapter_dtype=False)
    model.requires_grad_(False)
    embeddings = Embeddings(model.get_input_embeddings(), peft_model)
    embeddings.encoder.to(model.dtype).requires_grad_(not options.inference_mode)
    model.set_input_embeddings(embeddings)
    return embeddings


def load(model: PreTrainedModel, path: str, options: "PeftConfig") -> None:
    """Add the virtual tokens in a directory of peft to a model. Raises: UserError if they do not fit, or are not
    finite."""
    embeddings = attach(model, options)
    weight: Tensor = embeddings.encoder.embedding.weight
    saved = load_file(Path(path) / ADAPTER_WEIGHTS).get("prompt_embeddings")
    if saved is None or saved.shape != weight.shape or not saved.isfinite().all():
        shape = "none" if saved is None else f"{list(saved.shape)}"
        raise UserError(
            f"adapter '{path}': got prompt_embeddings {shape}, expected finite ones of {list(weight.shape)}, the "
            "number of virtual tokens and the width of its base model"
        )
    weight.data.copy_(saved)


def of(model: PreTrainedModel) -> Embeddings | None:
    """The virtual tokens of a model; None if it has none."""
    embeddings = model.get_input_embeddings()
    return embeddings if isinstance(embeddings, Embeddings) else None


def before(model: PreTrainedModel, rows: Sequences) -> Sequences:
    """The rows with the virtual tokens of the model before them, [B, N + S]; the same without any."""
    tokens = of(model)
    if tokens is None:
        return rows
    virtual = torch.tensor(tokens.ids, device=rows.ids.device).expand(len(rows.ids), -1)
    on = torch.ones_like(virtual, dtype=torch.bool)
    return Sequences(
        torch.cat([virtual, rows.ids], 1), torch.cat([on, rows.mask], 1), torch.cat([~on, rows.loss_mask], 1)
    )


def before_prompts(model: PreTrainedModel, prompts: Prompts) -> Prompts:
    """The same of left-padded prompts, which stay left-padded."""
    rows = before(model, Sequences(prompts.ids, prompts.mask, torch.zeros_like(prompts.mask)))
    order = rows.mask.byte().argsort(dim=1, stable=True)
    return Prompts(rows.ids.gather(1, order), rows.mask.gather(1, order), prompts.rows)
