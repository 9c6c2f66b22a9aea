"""A plan is made in a fresh process; here other tests have run before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def linear_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the `F.linear` that DeepSpeed leaves once a model was loaded under ZeRO-3: a pass keeps more with it."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
