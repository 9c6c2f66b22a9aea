"""The head of a language model, for the tokens of a loss alone; in pieces where their logits were the largest tensor.

The logits [N, V] of a micro-batch and their gradient are 2.5 GB in bf16 for 4,096 tokens of a vocabulary of 151,936,
more than the weights of a model of half a billion. Beyond WHOLE the head is read for a piece of the tokens at a time,
and once more in the backward pass. torch's `linear_cross_entropy` (2.13) and Liger's fused loss compute gradients in
the forward pass of a mean: they have no entropies, no temperature behind a cap, and no gradient for each token.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf.distributed.zero3 import full_shape, is_sharded
from rlhf.maths import ops

Entropy = Literal["none", "watched", "trained"]
"""whether a pass also gives the entropies, and whether they have a gradient, which takes more memory"""
Numbers = tuple[Tensor, Tensor | None]
"""log-probs and entropies, each [N]"""

WHOLE = 2**28
"""logits of a pass that exist at once: 0.5 GB in bf16, and as much for their gradient"""
PIECE = 2**26
"""logits of a piece: as many as a GPU converts to fp32 at once (`ops.logits_at_once`)"""
SPLITS = "head_splits"
"""the attribute of a model with the result of `detect`"""
SHOWN = "ids_with_probability"
"""the attribute of a model with their number, if its head has more ids"""


def predict(
    lm: PreTrainedModel,
    inputs: Mapping[str, Any],
    states: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    entropy: Entropy = "none",
) -> tuple[Numbers, Tensor]:
    """((log-probs [N] of `ids` in fp32, their entropies [N] if wanted), all hidden states [B, S, d]).

    inputs: of a forward pass; states: indices in B * S of the hidden states from which `ids` [N] are predicted
    """
    head, vocabulary = lm.get_output_embeddings(), lm.config.get_text_config().vocab_size
    # Under ZeRO-3 each call of the head gathers its weights, and ranks would make unequal numbers of calls.
    split = len(ids) * vocabulary > WHOLE and getattr(lm, SPLITS, False) and not is_sharded(head.weight)
    with restrict_head(head, states[:1] if split else states) as hidden:
        output = lm(**inputs, use_cache=False)
    if not split:
        return _numbers(output.logits[0], ids, temperature, entropy), hidden[0]

    def read(piece: Tensor, piece_ids: Tensor) -> Numbers:
        return _numbers(_finish(lm, head(piece)), piece_ids, temperature, entropy)

    rows = max(1, PIECE // vocabulary)
    pieces = zip(hidden[0].flatten(0, 1)[states].split(rows), ids.split(rows), strict=True)
    read_pieces = [checkpoint(read, *each, use_reentrant=False, preserve_rng_state=False) for each in pieces]
    logprobs, entropies = zip(*read_pieces, strict=True)
    return (torch.cat(logprobs), None if entropy == "none" else torch.cat(entropies)), hidden[0]


def _numbers(logits: Tensor, ids: Tensor, temperature: float, entropy: Entropy) -> Numbers:
    if entropy == "watched":
        return ops.logprobs_and_entropy(logits, ids, temperature)
    logprobs = ops.token_logprobs(logits, ids, temperature)
    return logprobs, ops.entropy(logits, temperature) if entropy == "trained" else None


def _finish(lm: PreTrainedModel, logits: Tensor) -> Tensor:
    """What models do with the output of the head [..., V]: Cohere's and Granite's scales, Gemma's cap, and -inf for ids
    that the tokenizer does not have."""
    config = lm.config.get_text_config()
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
        logits[..., count_ids(lm) :] = -torch.inf
    return logits


def hide_from(lm: PreTrainedModel, size: int) -> None:
    """Give the ids from `size` on, which the tokenizer does not have, a logit of -inf."""
    head = lm.get_output_embeddings()
    if full_shape(head.weight)[0] > size:
        capped = getattr(lm.config.get_text_config(), "final_logit_softcapping", None) is not None
        last = lm if capped else head  # a cap would make -30 of -inf
        last.register_forward_hook(functools.partial(_hide, size))
        setattr(lm, SHOWN, size)


def _hide(size: int, last: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> object:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    logits[..., size:] = -torch.inf
    return output


def count_ids(lm: PreTrainedModel) -> int:
    """How many ids can have a probability: those of the tokenizer that the model was loaded for."""
    return int(getattr(lm, SHOWN, lm.config.get_text_config().vocab_size))


@torch.no_grad()
def detect(lm: PreTrainedModel) -> None:
    """Find out whether `_finish` makes the logits of this model: for a token in a pass of its whole weights."""
    raw: list[Tensor] = []
    hook = lm.get_output_embeddings().register_forward_hook(lambda *call: raw.append(call[-1].clone()))
    try:
        logits = lm(input_ids=torch.zeros(1, 1, dtype=torch.long, device=lm.device), use_cache=False).logits
        setattr(lm, SPLITS, torch.equal(_finish(lm, raw[0]).to(logits.dtype), logits))
    finally:
        hook.remove()


@contextlib.contextmanager
def restrict_head(head: nn.Module, states: Tensor) -> Iterator[list[Tensor]]:
    """Inside, the head gets only N of the hidden states [B, S, d], at the indices `states` in B * S, as [1, N, d].

    Yields a list to which each pass appends all hidden states.
    """
    hidden: list[Tensor] = []

    def restrict(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        hidden.append(arguments[0])
        return (arguments[0].flatten(0, 1)[states][None],)

    hook = head.register_forward_pre_hook(restrict)
    try:
        yield hidden
    finally:
        hook.remove()
