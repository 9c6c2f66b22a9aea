"""The policy: a causal language model that tells each token's log-probability. The place that shifts logits."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, DynamicLayer, PretrainedConfig, PreTrainedModel

from rlhf import ops
from rlhf.types import Sequences

Entropy = Literal["none", "watched", "trained"]


def takes(model: Any, argument: str) -> bool:
    """Whether the forward pass of a transformers model, under an adapter or not, has this argument."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return argument in inspect.signature(base.forward).parameters


def keeps_all(config: PretrainedConfig) -> bool:
    """Whether every layer attends to all tokens: no sliding window, no recurrent state."""
    windowed = getattr(config, "window_size", None) is not None  # GPT-Neo, whose cache keeps all
    return not windowed and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


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
        `entropy[b, s]` is that of the distribution token s was drawn from; only "trained" gives it a gradient.
        Both are [B, S] and 0 off the loss mask. Only the states that a token is predicted from pass through the head.
        """
        s = sequences
        where = s.loss_mask.nonzero(as_tuple=True)  # of N tokens
        states = (where[0], ops.positions(s.mask)[where] - 1)
        with only(self.lm.get_output_embeddings(), states):
            output = self.lm(input_ids=ops.flush_left(s.ids, s.mask), use_cache=False)
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
def only(head: nn.Module, states: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Meanwhile the head sees only the hidden states at these N places, as [1, N, d]."""
    hook = head.register_forward_pre_hook(lambda _, arguments: (arguments[0][states][None],))
    try:
        yield
    finally:
        hook.remove()
