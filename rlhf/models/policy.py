"""The policy: a causal language model that returns each token's log-probability. Only this module shifts logits."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.maths import ops
from rlhf.models import packing
from rlhf.types import Sequences

Entropy = Literal["none", "watched", "trained"]


class Policy(nn.Module):
    """A causal language model as pi(token | tokens before it)."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    @property
    def packs(self) -> bool:
        """Whether rows are packed, so that no padding is computed."""
        return packing.packs(self.lm)

    def forward(
        self, sequences: Sequences, temperature: float = 1.0, entropy: Entropy = "none"
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and entropies if wanted, of the tokens under the loss mask.

        `logprobs[b, s]` is log pi(ids[b, s] | ids[b, :s]) in fp32, with logits divided by `temperature`;
        `entropy[b, s]` is that of the distribution token s was drawn from; only "trained" gives it a gradient.
        Both are [B, S] and 0 off the loss mask. Only the states that a token is predicted from pass through the head.
        """
        s = sequences
        predicted = s.loss_mask.nonzero(as_tuple=True)  # of N tokens
        inputs = packing.model_inputs(self.lm, s.ids, s.mask)
        with restrict_head(self.lm.get_output_embeddings(), inputs.states[predicted] - 1):
            output = self.lm(**inputs.inputs, use_cache=False)
        logits, ids = output.logits[0], s.ids[predicted]
        empty = torch.zeros(s.ids.shape, device=ids.device)
        if entropy == "watched":
            logprobs, spread = ops.logprobs_and_entropy(logits, ids, temperature)
            return empty.to(logprobs).index_put(predicted, logprobs), empty.to(spread).index_put(predicted, spread)
        logprobs = ops.token_logprobs(logits, ids, temperature)
        placed = empty.to(logprobs).index_put(predicted, logprobs)
        if entropy == "none":
            return placed, None
        return placed, empty.to(logprobs).index_put(predicted, ops.entropy(logits, temperature))


def generator(model: nn.Module) -> PreTrainedModel | None:
    """The language model in a policy, which generation calls directly; None = the model is no policy."""
    return model.lm if isinstance(model, Policy) else None


@contextlib.contextmanager
def restrict_head(head: nn.Module, states: Tensor) -> Iterator[None]:
    """Inside, the head gets only N of the hidden states [B, S, d], at the indices `states` in B * S, as [1, N, d]."""
    hook = head.register_forward_pre_hook(lambda _, arguments: (arguments[0].flatten(0, 1)[states][None],))
    try:
        yield
    finally:
        hook.remove()
