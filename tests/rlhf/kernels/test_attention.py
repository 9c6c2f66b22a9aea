"""Attention by products, beside the formula in fp64 and transformers' sdpa."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf.kernels import attention
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from tests.support import tiny

HEADS, GROUPS, WIDTH = 6, 2, 16
MODULE: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // GROUPS)
KINDS = ("none", "bool", "added")


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = [(2, length, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(s, generator=draw).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


def visible(length: int, kind: str) -> Tensor:
    """Who sees whom: causal, and with a mask some tokens do not see a stretch before them, as in rows of pairs."""
    visibility = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    if kind != "none":
        visibility[1, :, length // 2 :, length // 4 : length // 2] = False
    return visibility


def mask(length: int, kind: str, dtype: torch.dtype) -> Tensor | None:
    visibility = visible(length, kind)
    if kind == "added":
        return torch.zeros((), dtype=dtype).masked_fill(~visibility, torch.finfo(dtype).min)
    return visibility if kind == "bool" else None


def formula(q: Tensor, k: Tensor, v: Tensor, visibility: Tensor, cap: float | None = None) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = q @ k.mT / WIDTH**0.5
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~visibility, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def apart(got: Tensor, want: Tensor) -> float:
    """The difference as a share of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 100, attention.BLOCK, attention.BLOCK + 1, 300])
def test_values_and_gradients_are_those_of_the_formula(length: int, kind: str) -> None:
    qkv = inputs(length, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    output, _ = attention.attention(MODULE, *qkv, mask(length, kind, torch.bfloat16))
    expected = formula(*exact, visible(length, kind))
    outer = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = torch.autograd.grad(output, qkv, outer)
    for got, want in zip(
        (output, *gradients), (expected, *torch.autograd.grad(expected, exact, outer.double())), strict=True
    ):
        assert float((got.double() - want).norm() / want.norm()) < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_capped_scores_are_those_of_the_formula(kind: str) -> None:
    """Of whole rows with gradients, and of one token."""
    qkv, cap = inputs(40, torch.float32), 0.3
    exact = [x.detach().double().requires_grad_() for x in qkv]
    output, _ = attention.attention(MODULE, *qkv, mask(40, kind, torch.float32), softcap=cap)
    expected = formula(*exact, visible(40, kind), cap)
    outer = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    got = (output, *torch.autograd.grad(output, qkv, outer))
    want = (expected, *torch.autograd.grad(expected, exact, outer.double()))
    assert all(apart(x, y) < 1e-5 for x, y in zip(got, want, strict=True))
    assert apart(formula(*exact, visible(40, kind)), expected) > 0.1
    last = visible(40, kind)[:, :, -1:]
    output, _ = attention.attention(MODULE, qkv[0][:, :, -1:], *qkv[1:], last, softcap=cap)
    assert apart(output, expected[:, -1:]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_token_sees_what_the_mask_shows(dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in inputs(40, dtype))
    visibility = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    visibility[0, ..., :7], visibility[1, ..., 30:] = False, False
    for shown in (visibility, None):
        output, _ = attention.attention(MODULE, q[:, :, -1:], k, v, shown)
        expected, _ = sdpa_attention_forward(MODULE, q[:, :, -1:], k, v, shown)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_what_it_is_not_made_for_is_left_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def sdpa(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        calls.append(options)
        return arguments[1], None

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    qkv = inputs(8, torch.bfloat16)
    looking = SimpleNamespace(is_causal=False, num_key_value_groups=HEADS // GROUPS)
    attention.attention(looking, *qkv, None)  # type: ignore[arg-type]
    attention.attention(MODULE, *qkv, None, dropout=0.1)
    attention.attention(MODULE, *inputs(8, torch.float32), None)
    attention.attention(MODULE, *(x.detach() for x in qkv), None)
    assert len(calls) == 4 and calls[1]["dropout"] == 0.1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_learns_the_same(family: str) -> None:
    lm, rows = tiny.causal_lm(family).bfloat16(), tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
    results = []
    for _ in range(2):
        logprobs = Policy(lm)(rows).logprobs
        gradients = torch.autograd.grad(logprobs.sum(), list(lm.parameters()), allow_unused=True)
        results.append((logprobs, torch.cat([g.flatten() for g in gradients if g is not None])))
        attention.install(lm)
    (plain, expected), (quick, gradient) = results
    assert torch.equal(quick, plain)
    assert apart(gradient, expected) < 0.02


def test_a_model_that_is_read_on_a_cpu_attends_so_and_its_config_does_not_tell(tmp_path: Path) -> None:
    tiny.causal_lm("llama").save_pretrained(tmp_path / "model")
    lm = load_causal_lm(str(tmp_path / "model"), torch.bfloat16, tiny.VOCAB)
    assert lm.config._attn_implementation == attention.NAME
    lm.save_pretrained(tmp_path / "saved")
    assert attention.NAME not in json.dumps(json.loads((tmp_path / "saved" / "config.json").read_text()))
