"""The policy: a causal language model that returns each token's log-probability. Only this module shifts logits."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.maths import ops
from rlhf.models import lm_head, packing, virtual_tokens
from rlhf.models.head import ScoreHead
from rlhf.models.lm_head import Entropy
from rlhf.models.scalar import ScalarModel
from rlhf.types import Sequences, to_device

Learns = Literal["all", "head"]
"""which weights a loss of the values trains: all, or the value head alone"""


class TokenOutput(NamedTuple):
    """What a pass gives for each token. A tuple, because ZeRO-3 looks for tensors in tuples, lists and dicts only."""

    logprobs: Tensor
    """[B, S]"""
    entropies: Tensor | None = None
    """[B, S]; None: not asked for"""
    values: Tensor | None = None
    """fp32 [B, S], at every token; None: the policy has no value head"""


@dataclass(frozen=True, slots=True)
class States:
    """The last hidden states of a pass."""

    hidden: Tensor
    """[N, d], of all tokens that the model computed"""
    tokens: Tensor
    """[B, S] long, the state of each token; arbitrary off the mask"""


class Policy(nn.Module):
    """A causal language model as pi(token | tokens before it)."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, sequences: Sequences, temperature: float = 1.0, entropy: Entropy = "none") -> TokenOutput:
        """Log-probs, and entropies if wanted, of the tokens under the loss mask, on the device of the model.

        `logprobs[b, s]` is log pi(ids[b, s] | ids[b, :s]) in fp32, with logits divided by `temperature`;
        `entropies[b, s]` is that of the distribution token s was drawn from; only "trained" gives it a gradient.
        Both are 0 off the loss mask. Only the states that a token is predicted from pass through the head.
        """
        return self._read(sequences, temperature, entropy)[0]

    def _read(self, sequences: Sequences, temperature: float, entropy: Entropy) -> tuple[TokenOutput, States]:
        """The same, and the hidden states that the head reads."""
        s, device = virtual_tokens.before(self.lm, sequences), self.lm.device
        on_mask = s.loss_mask.nonzero(as_tuple=True)  # of N tokens
        inputs = packing.model_inputs(self.lm, s.ids, s.mask)
        before, ids = to_device(inputs.states[on_mask] - 1, device), to_device(s.ids[on_mask], device)
        (logprobs, entropies), hidden = lm_head.predict(self.lm, inputs.inputs, before, ids, temperature, entropy)
        predicted = tuple(to_device(index, device) for index in on_mask)

        def placed(values: Tensor) -> Tensor:
            rows = torch.zeros(s.ids.shape, dtype=values.dtype, device=device).index_put(predicted, values)
            return rows[:, -sequences.ids.shape[1] :]

        output = TokenOutput(placed(logprobs), None if entropies is None else placed(entropies))
        return output, States(hidden.flatten(0, 1), to_device(inputs.states, device))


class ActorCritic(Policy):
    """A policy and its critic on one backbone: a language model with a value head beside its own head."""

    def __init__(self, lm: PreTrainedModel, head: ScoreHead) -> None:
        super().__init__(lm)
        self.score = head

    def forward(
        self, sequences: Sequences, temperature: float = 1.0, entropy: Entropy = "none", learns: Learns = "all"
    ) -> TokenOutput:
        """As `Policy.forward`, and of the same pass the values, 0 off the mask.

        learns: "head": a loss of the values has a gradient for the value head alone.
        Every weight has a gradient, perhaps 0, in every backward pass, as ZeRO requires: each result has the other one
        times 0 in it.
        """
        output, states = self._read(sequences, temperature, entropy)
        hidden = states.hidden if learns == "all" else states.hidden.detach()
        scalars = self.score(hidden).flatten().gather(0, states.tokens.flatten()).view_as(states.tokens)
        values = ops.zero_off_mask(scalars, to_device(sequences.mask, scalars.device))
        nothing = 0.0 * (output.logprobs.sum() + values.sum())
        return TokenOutput(output.logprobs + nothing, output.entropies, values + nothing)

    def critic(self) -> ScalarModel:
        """The critic alone, with the same weights."""
        backbone: Any = self.lm.base_model
        return ScalarModel(backbone, self.score)


def generator(model: nn.Module) -> PreTrainedModel | None:
    """The language model in a policy, which generation calls directly; None = the model is no policy."""
    return model.lm if isinstance(model, Policy) else None
