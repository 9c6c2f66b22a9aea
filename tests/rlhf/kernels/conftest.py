"""What tests of compiled layers share."""

import pytest


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as they were traced: which graphs there are is the compiler's, without its minutes of C++."""
    import torch._inductor.compile_fx

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", lambda module, *_, **__: module.forward)
