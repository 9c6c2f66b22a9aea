"""The policy: a causal language model that tells each token's log-probability. The only place that shifts logits."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf import ops
from rlhf.types import Sequences

Entropy = Literal["none", "watched", "trained"]


def takes(model: Any, argument: str) -> bool:
    """Whether the forward pass of a transformers model, under an adapter or not, has this argument."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return argument in inspect.signature(base.forward).parameters


def position_arguments(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """`position_ids` that count real tokens only, for architectures that take them (BLOOM and MPT do not).

    Without them a left-padded row of GPT-2 is off by 0.4 nats.
    """
    return {"position_ids": ops.positions(mask)} if takes(model, "position_ids") else {}


class Policy(nn.Module):
    """A causal language model seen as pi(token | tokens before it)."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, sequences: Sequences, temperature: float = 1.0, entropy: Entropy = "none"
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and entropies if wanted, of the tokens under the loss mask.

        `logprobs[b, s]` is log pi(ids[b, s] | ids[b, :s]) in fp32, with logits divided by `temperature`;
        `entropy[b, s]` is that of the distribution token s was drawn from; only "trained" gives it a gradient,
        which keeps all logits for the backward pass. Both are [B, S] and 0 off the loss mask. Only positions that
        some row needs pass through the head.
        """
        s = sequences
        predicted = s.loss_mask.any(0).nonzero().squeeze(1)  # [K] columns with a token to predict
        output = self.lm(
            input_ids=s.ids,
            attention_mask=s.mask.long(),
            logits_to_keep=predicted - 1,
            use_cache=False,
            **position_arguments(self.lm, s.mask),
        )
        kept = s.loss_mask[:, predicted]
        logprobs = ops.token_logprobs(output.logits, s.ids[:, predicted], temperature)
        empty = torch.zeros(s.ids.shape, dtype=logprobs.dtype, device=logprobs.device)
        logprobs = empty.index_copy(1, predicted, torch.where(kept, logprobs, 0.0))
        if entropy == "none":
            return logprobs, None
        with torch.set_grad_enabled(entropy == "trained" and torch.is_grad_enabled()):
            found = torch.where(kept, ops.entropy(output.logits, temperature), 0.0)
            return logprobs, empty.index_copy(1, predicted, found)
