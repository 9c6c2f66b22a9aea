"""The head of scalar models: its weight and its product are fp32 for a model of any dtype."""

import torch
from torch import Tensor, nn


class ScoreHead(nn.Module):
    """One number from a state, w . h, without bias.

    Scores near 10 in bf16 would be 0.03 off (rms; 0.14 at most), of which the product makes 0.02 and the weight 0.02.
    ZeRO requires one dtype for all weights. So `weight` has that of the model, and `residual` is its rounding error:
    their sum is the fp32 weight, which is the optimizer's master weight.
    """

    residual: Tensor

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> None:
        """weight: [1, d], of any dtype; dtype: that of the model."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(dtype, copy=True))
        self.register_buffer("residual", torch.zeros_like(weight, dtype=torch.float32), persistent=False)
        self.refine(weight)

    @property
    def exact(self) -> Tensor:
        """The fp32 weight [1, d]; its gradient is that of `weight`."""
        return self.weight.float() + self.residual

    @torch.no_grad()
    def refine(self, exact: Tensor) -> None:
        """Set the fp32 weight to `exact`; `weight` must be `exact` rounded to its dtype."""
        self.residual.copy_(exact.float() - exact.to(self.weight.dtype).float())

    def forward(self, states: Tensor) -> Tensor:
        """[..., d] in any dtype -> [..., 1] in fp32."""
        return nn.functional.linear(states.float(), self.exact)
