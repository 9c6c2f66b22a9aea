"""`--optim`: each weight moves as the library's own optimizer moves it, in fp32, and the state has the planned size."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.options import EngineOptions, TrainingOptions
from rlhf.engine import optimizers
from rlhf.engine.adamw import MASTER
from rlhf.engine.optimizers import LibraryOptimizer, build, state_numbers
from rlhf.errors import UserError
from rlhf.training.checks import check_engine
from tests.support import tiny

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)
KINDS = ["muon", pytest.param("adamw_8bit", marks=needs_package)]
OPTIONS = TrainingOptions(
    learning_rate=0.01, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, warmup_ratio=0
)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


class Layers(nn.Module):
    """A matrix of each shape, one stored transposed, beside an embedding, a norm and experts in one tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=draw).to(dtype))

        self.embedding = nn.Embedding.from_pretrained(weight(100, 64), freeze=False)
        self.wide, self.tall, self.experts = weight(48, 96), weight(96, 48), weight(3, 40, 48)
        self.transposed, self.norm = nn.Parameter(weight(80, 64).data.t()), weight(64)


def library(kind: str, named: Sequence[tuple[str, Tensor]]) -> list[torch.optim.Optimizer]:
    """The library's own optimizers of these fp32 weights, as its documentation uses them; AdamW for the others."""
    special = {
        "muon": lambda name: name in ("wide", "tall", "transposed"),
        "adamw_8bit": lambda name: name not in ("embedding.weight", "norm"),
    }[kind]

    def groups(chosen: bool) -> list[dict[str, Any]]:
        own = [(name, weight) for name, weight in named if special(name) == chosen]
        return [{"params": [w for _, w in own if (w.dim() > 1) == decays], "weight_decay": 0.1 * decays}
                for decays in (True, False)]  # fmt: skip

    adam: Any = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3}
    if kind == "muon":
        own: Any = torch.optim.Muon(groups(True), lr=0.01, adjust_lr_fn="match_rms_adamw")
    else:
        import bitsandbytes as bnb

        own = bnb.optim.AdamW8bit(groups(True), **adam)
    return [own, torch.optim.AdamW(groups(False), **adam, fused=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_librarys_on_fp32_weights(kind: Any, dtype: torch.dtype) -> None:
    """To the bit, with clipping before the step, and with the state that the plan counts."""
    model, copies = Layers(dtype), Layers(dtype).float()
    mine = build(model, OPTIONS.model_copy(update={"optim": kind}), {}, plain=True)
    assert isinstance(mine, LibraryOptimizer)
    mine.scale = 0.25
    theirs = library(kind, list(copies.named_parameters()))
    draw = torch.Generator().manual_seed(1)
    for rate in (0.01, 0.03, 0.002):  # as a schedule sets them
        for group in (group for optimizer in (mine, *theirs) for group in optimizer.param_groups):
            group["lr"] = rate
        for own, other in zip(model.parameters(), copies.parameters(), strict=True):
            gradient = torch.randn(own.shape, generator=draw).to(dtype)
            own.grad, other.grad = gradient, gradient.float() * 0.25
        mine.step()
        for each in theirs:
            each.step()
    outer = optimizers.outer_weights(model)
    assert outer == {id(model.embedding.weight)}
    for (name, own), other in zip(model.named_parameters(), copies.parameters(), strict=True):
        master = mine.state[own].get(MASTER, own)
        assert master.dtype == torch.float32 and torch.equal(master, other), name
        assert torch.equal(own, master.to(dtype)), name
        numbers, codes = state_numbers(kind, own.shape, id(own) in outer)
        state = mine.moments(own).values()
        assert sum(x.nbytes for x in state) == 4 * numbers + codes, name


def test_the_first_step_of_muon_by_hand() -> None:
    """The gradient with singular values near 1, times 0.2 sqrt(longest side): about the size of AdamW's step."""
    gradient = torch.tensor([[3.0, 1.0], [-1.0, 2.0], [0.5, -4.0]], dtype=torch.float64)
    model = nn.Module()
    model.matrix = nn.Parameter(torch.zeros(3, 2))
    model.matrix.grad = gradient.float()
    build(model, OPTIONS.model_copy(update={"optim": "muon"}), {}, plain=True).step()
    moved = -model.matrix.detach().double() / 0.01
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    along = left.T @ (moved / (0.2 * math.sqrt(3))) @ right.T
    assert ((along.diagonal() > 0.5) & (along.diagonal() < 1.5)).all()  # where the five iterations leave it
    assert (along - along.diagonal().diag()).abs().max() < 2**-5  # bf16 rounds to 2^-9 in each of 15 products


def test_several_ranks_may_have_whole_weights_each() -> None:
    check_engine(EngineOptions(optim="muon", dtype="fp32", zero_stage=0), ranks=2)


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(optim="paged_adamw_8bit", dtype="fp32")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"paged_adamw_8bit: .*pip install 'rlhf-pipeline\[quantize\]'"):
        optimizers.require_usable(options, torch.device("cuda"))


@needs_package
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_paged_steps_are_those_without_pages() -> None:
    """To the bit; state of 100,000 numbers and more is paged."""
    states = []
    for kind in ("adamw_8bit", "paged_adamw_8bit"):
        model = nn.Linear(512, 512, bias=False).cuda()
        nn.init.eye_(model.weight)
        own = build(model, OPTIONS.model_copy(update={"optim": kind}), {}, plain=True)  # type: ignore[arg-type]
        assert isinstance(own, LibraryOptimizer)
        for step in range(3):
            model.weight.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(step)).cuda()
            own.step()
        paged = [getattr(x, "is_paged", False) for x in own.moments(model.weight).values()]
        assert any(paged) == (kind == "paged_adamw_8bit")
        states.append([model.weight.detach().cpu(), *(x.cpu() for x in own.moments(model.weight).values())])
    assert all(map(torch.equal, *states))
