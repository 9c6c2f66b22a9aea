"""What a run says of the device that it uses."""

import pytest
import torch

from rlhf.training import hardware


@pytest.mark.parametrize(("kind", "hip", "expected"), [
    (None, None, None), ("cuda", None, None), ("cuda", "6.2", "AMD GPU is used"), ("mps", None, "not the mps device"),
    ("xpu", None, "the CPU is used, not the xpu"),
])  # fmt: skip
def test_an_accelerator_that_is_not_used_is_named(
    kind: str | None, hip: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(str(kind)))
    note = hardware.accelerator_note()
    assert note is None if expected is None else note is not None and expected in note
