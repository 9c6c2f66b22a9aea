"""The policy: a causal language model that tells each token's log-probability. The place that shifts logits."""

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
    """A causal language model seen as pi(token | tokens before it)."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    @property
    def packs(self) -> bool:
        """Whether no padding is computed."""
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
        where = s.loss_mask.nonzero(as_tuple=True)  # of N tokens
        read = packing.reading(self.lm, s.ids, s.mask)
        with only(self.lm.get_output_embeddings(), read.states[where] - 1):
            output = self.lm(**read.inputs, use_cache=False)
        logits, ids = output.logits[0], s.ids[where]
        empty = torch.zeros(s.ids.shape, device=ids.device)
        if entropy == "watched":
            logprobs, spread = ops.logprobs_and_entropy(logits, ids, temperature)
            return empty.to(logprobs).index_put(where, logprobs), empty.to(spread).index_put(where, spread)
        logprobs = ops.token_logprobs(logits, ids, temperature)
        placed = empty.to(logprobs).index_put(where, logprobs)
        if entropy == "none":
            return placed, None
        return placed, empty.to(logprobs).index_put(where, ops.entropy(logits, temperature))


@contextlib.contextmanager
def only(head: nn.Module, states: Tensor) -> Iterator[None]:
    """Meanwhile the head sees only N of the hidden states [B, S, d], those at these of B * S places, as [1, N, d]."""
    hook = head.register_forward_pre_hook(lambda _, arguments: (arguments[0].flatten(0, 1)[states][None],))
    try:
        yield
    finally:
        hook.remove()
