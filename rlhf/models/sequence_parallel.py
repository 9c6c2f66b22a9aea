"""Policies and scalar models whose ranks share the tokens of each row (Ulysses, arXiv 2309.14509, by DeepSpeed).

Each rank computes its stretch of every row. In attention, where tokens interact, the ranks exchange: each gets all
tokens for its share of the heads, and afterwards its own tokens for all heads. The result is gathered and the same on
every rank. Rows must be padded on the right: there is no mask, and causal attention never looks to the right.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf.distributed import collectives
from rlhf.maths import ops
from rlhf.models import lm_head
from rlhf.models.lm_head import Entropy
from rlhf.models.policy import Policy, TokenOutput
from rlhf.models.scalar import ScalarModel
from rlhf.types import JoinedPairs, Sequences, to_device

ATTENTION = "ulysses"


def policy(lm: PreTrainedModel, size: int) -> Policy:
    """A language model as a policy, whose rows `size` ranks share."""
    return Policy(lm) if size == 1 else SplitPolicy(lm)


def scalar_model(model: ScalarModel, size: int) -> ScalarModel:
    """The same model; `size` ranks share its rows."""
    return model if size == 1 else SplitScalarModel(model)


class SplitPolicy(Policy):
    """A policy whose rows are split over the ranks of a replica."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        self._stretch = Stretch(lm)

    def forward(self, sequences: Sequences, temperature: float = 1.0, entropy: Entropy = "none") -> TokenOutput:
        """As `Policy.forward`, for the whole rows; without entropies."""
        assert entropy == "none", "entropies are not supported with sequence parallelism"
        stretch, length, device = self._stretch, sequences.ids.shape[1], self.lm.device
        targets = stretch.part(sequences.ids.roll(-1, 1))
        counts = stretch.part(F.pad(sequences.loss_mask[:, 1:], (0, 1)))
        columns = counts.any(0).nonzero().squeeze(1)  # [K] of the stretch; there may be none
        on_host = (columns, counts[:, columns], targets[:, columns])
        predicting, mask, ids = (to_device(x, device) for x in on_host)
        inputs = stretch.inputs(sequences, device)
        offsets = torch.arange(len(ids), device=device)[:, None] * inputs["input_ids"].shape[1]
        states = (offsets + predicting).flatten()
        (logprobs, _), _ = lm_head.predict(self.lm, inputs, states, ids.flatten(), temperature)
        logprobs = logprobs.view_as(ids)
        own_logprobs = torch.zeros(targets.shape, dtype=logprobs.dtype, device=logprobs.device)
        own_logprobs = own_logprobs.index_copy(1, predicting, torch.where(mask, logprobs, 0.0))
        return TokenOutput(F.pad(stretch.gather(own_logprobs), (1, 0))[:, :length])


class SplitScalarModel(ScalarModel):
    """A scalar model whose rows are split over the ranks of a replica."""

    joins = False

    def __init__(self, model: ScalarModel) -> None:
        super().__init__(model.backbone, model.score)
        self._stretch = Stretch(model.backbone)

    def forward(self, rows: Sequences | JoinedPairs) -> Tensor:
        """The scalar at every token, fp32 [B, S]."""
        assert isinstance(rows, Sequences), "pairs in one row need a mask"
        inputs = self._stretch.inputs(rows, self.backbone.device)
        hidden = self.backbone(**inputs, use_cache=False).last_hidden_state
        return self._stretch.gather(self.score(hidden).squeeze(-1))[:, : rows.ids.shape[1]]


class Stretch:
    """This rank's stretch of each row, and the model's attention over all of them. All ranks create it together."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._group = collectives.replica_group()
        self._size, self._number = collectives.ranks_per_replica(), collectives.rank() % collectives.ranks_per_replica()
        from deepspeed.sequence.layer import DistributedAttention  # einops and an operator, which few runs need

        self._exchanging = DistributedAttention(self._attend_to_all, self._group, scatter_idx=2, gather_idx=1)
        AttentionInterface.register(ATTENTION, self._attend)
        model.set_attn_implementation(ATTENTION)

    def part(self, rows: Tensor) -> Tensor:
        """The stretch [B, L] of rows [B, S], padded to L * ranks with zeros."""
        length = -(-rows.shape[1] // self._size)
        padded = F.pad(rows, (0, length * self._size - rows.shape[1]))
        return padded[:, self._number * length : (self._number + 1) * length]

    def inputs(self, rows: Sequences, device: torch.device) -> dict[str, Tensor]:
        """The arguments of a model's pass over the stretch. Padding has position 0, which every model supports."""
        assert not (rows.mask[:, 1:] > rows.mask[:, :-1]).any(), "rows are padded on the left"
        positions = ops.positions(rows.mask).masked_fill(~rows.mask, 0)
        inputs = {"input_ids": rows.ids, "position_ids": positions}
        return {name: to_device(self.part(value), device) for name, value in inputs.items()}

    def gather(self, own: Tensor) -> Tensor:
        """All stretches [B, L * ranks] in order; in the backward pass each rank gets the gradient of its own."""
        gathered: Tensor = _Gathered.apply(own, self._group)
        return gathered

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **more: object
    ) -> tuple[Tensor, None]:
        """Causal attention over whole rows for a share of the heads. q, k, v [B, heads, L, d] -> [B, L, heads, d]"""
        assert attention_mask is None, "there is no mask over whole rows"
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self._exchanging(q, k, v, 0, module=module, **more), None

    @staticmethod
    def _attend_to_all(q: Tensor, k: Tensor, v: Tensor, module: nn.Module, **more: Any) -> Tensor:
        """The same inside the exchange. q, k, v [B, L * ranks, heads / ranks, d]"""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended: Tensor = sdpa_attention_forward(module, q, k, v, None, **more)[0]
        return attended


class _Gathered(torch.autograd.Function):
    """[B, L] of all ranks, concatenated. Every rank computes the same loss of the result, so the gradient is not
    summed."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.length, ctx.number = mine.shape[1], torch.distributed.get_rank(group)
        parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][:, ctx.number * ctx.length : (ctx.number + 1) * ctx.length], None
