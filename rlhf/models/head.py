"""The head of scalar models: fp32 in its weight and its product, however narrow the model below it is."""

import torch
from torch import Tensor, nn


class ScoreHead(nn.Module):
    """One number from a state, w . h, without bias.

    Scores near 10 in bf16 would be 0.03 off (rms; 0.14 at most), of which the product makes 0.02 and the weight 0.02.
    ZeRO wants all weights in one dtype. So `weight` has that of the model, and `rest` is what rounding took off it: the
    sum is the fp32 weight, which is the optimizer's master copy.
    """

    rest: Tensor

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> None:
        """weight: [1, d], of any dtype; dtype: that of the model."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(dtype, copy=True))
        self.register_buffer("rest", torch.zeros_like(weight, dtype=torch.float32), persistent=False)
        self.refine(weight)

    @property
    def exact(self) -> Tensor:
        """The fp32 weight [1, d]; its gradient is that of `weight`."""
        return self.weight.float() + self.rest

    @torch.no_grad()
    def refine(self, exact: Tensor) -> None:
        """Take `exact` for the fp32 weight, of which `weight` is the nearest in its dtype."""
        self.rest.copy_(exact.float() - exact.to(self.weight.dtype).float())

    def forward(self, states: Tensor) -> Tensor:
        """[..., d] in any dtype -> [..., 1] in fp32."""
        return nn.functional.linear(states.float(), self.exact)
