"""The head in pieces beside the head that is read whole, for every family, with what people put on a head."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rlhf import adapters
from rlhf.models import lm_head
from rlhf.models.lm_head import Entropy
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from tests.support import families, tiny

ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
TOKENS = int(ROWS.loss_mask.sum())
NEAR = 64 * torch.finfo(torch.float32).eps
"""two orders of a sum over the vocabulary, as a share of the sum; and of the gradients of the layers below"""


def in_pieces(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Every pass reads the head for so many tokens at a time."""
    monkeypatch.setattr(lm_head, "WHOLE", 0)
    monkeypatch.setattr(lm_head, "PIECE", tokens * tiny.VOCAB)


def outputs(lm: PreTrainedModel, temperature: float = 1.0, entropy: Entropy = "none") -> list[Tensor]:
    """Log-probs, entropies, and the gradients of all trained weights as one vector."""
    lm.zero_grad()
    result = Policy(lm)(ROWS, temperature, entropy)
    values = [value for value in result[:2] if value is not None]
    weights = torch.linspace(-1, 1, ROWS.ids.numel()).view(ROWS.ids.shape)
    sum(((value * weights).sum() for value in values if value.requires_grad), torch.zeros(())).backward()
    gradients = [weight.grad.flatten() for weight in lm.parameters() if weight.grad is not None]
    return [*(value.detach() for value in values), torch.cat(gradients)]


def assert_equal(got: list[Tensor], wanted: list[Tensor], near: float = NEAR) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert float((one - other).norm()) <= near * float(other.norm())


@pytest.mark.parametrize("family", families.ALL)
def test_pieces_are_the_whole_for_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cohere and Granite scale their logits, Gemma 2 caps them; others tie the head to the embeddings."""
    changes = {"final_logit_softcapping": 0.5} if family == "gemma2" else {}
    lm = tiny.causal_lm(family, **{**families.ALL[family], **changes})
    lm_head.detect(lm)
    whole = outputs(lm)
    in_pieces(monkeypatch, 7)
    assert_equal(outputs(lm), whole)


@pytest.mark.parametrize("entropy", ["none", "watched", "trained"])
def test_pieces_have_temperature_and_entropies(entropy: Entropy, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.causal_lm("cohere", **families.ALL["cohere"])
    lm_head.detect(lm)
    whole = outputs(lm, 0.7, entropy)
    in_pieces(monkeypatch, 10)
    assert_equal(outputs(lm, 0.7, entropy), whole)


def test_pieces_of_a_head_with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.causal_lm("llama")
    lm_head.detect(lm)
    adapters.wrap(lm, "lora,target_modules=['lm_head','q_proj']")
    for name, weight in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, 0.0, 0.2)
    whole = outputs(lm)
    in_pieces(monkeypatch, 7)
    assert_equal(outputs(lm), whole)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ids_beyond_the_tokenizer_have_no_probability_in_pieces(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.causal_lm(family).save_pretrained(tmp_path)
    lm = load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB - 5)
    monkeypatch.setattr(lm_head.ops, "token_logprobs", lambda logits, ids, _: logits[..., -6:].sum(-1))
    in_pieces(monkeypatch, 7)
    with torch.no_grad():
        assert bool((Policy(lm)(ROWS).logprobs[ROWS.loss_mask] == -torch.inf).all())


def test_pieces_in_bf16_are_as_near_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head is a sum of K pieces in bf16: K - 1 more roundings of at most 2^-9 of it."""
    exact = tiny.causal_lm("llama").double()
    lm = tiny.causal_lm("llama").to(torch.bfloat16)
    lm_head.detect(lm)
    wanted = outputs(exact)
    whole = outputs(lm)
    in_pieces(monkeypatch, 10)
    pieces = outputs(lm)
    assert torch.equal(pieces[0], whole[0])
    errors = [float((each[1].double() - wanted[1]).norm() / wanted[1].norm()) for each in (pieces, whole)]
    assert errors[0] <= errors[1] + (-(-TOKENS // 10) - 1) * 2**-9


class Largest(TorchDispatchMode):
    """The most numbers of logits that an operation makes; the transposed weight of a head is none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple[object, ...] = (), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor) and each.shape[-1:] == (tiny.VOCAB,) and each.shape[0] != tiny.WIDTH:
                self.numbers = max(self.numbers, each.numel())
        return out


def largest(lm: PreTrainedModel) -> Iterator[int]:
    for training in (True, False):
        with Largest() as seen, torch.set_grad_enabled(training):
            outputs(lm) if training else Policy(lm)(ROWS, entropy="watched")
        yield seen.numbers // tiny.VOCAB


def test_no_tensor_has_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.causal_lm("llama", tie_word_embeddings=False)
    lm_head.detect(lm)
    assert list(largest(lm)) == [TOKENS, TOKENS]
    in_pieces(monkeypatch, 7)
    assert list(largest(lm)) == [7, 7]


def test_a_head_that_is_not_known_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does something else with the output of its head, as a new family may."""
    lm = tiny.causal_lm("llama")

    def halved(_: object, inputs: object, output):  # type: ignore[no-untyped-def]
        output.logits = output.logits / 2
        return output

    lm.register_forward_hook(halved)
    lm_head.detect(lm)
    whole = outputs(lm)
    in_pieces(monkeypatch, 7)
    assert_equal(outputs(lm), whole, 0.0)
    assert next(largest(lm)) == TOKENS


def test_sharded_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a head under ZeRO-3 gathers it, and ranks with more tokens would make more calls."""
    lm = tiny.causal_lm("llama", tie_word_embeddings=False)
    lm_head.detect(lm)
    in_pieces(monkeypatch, 7)
    monkeypatch.setattr(lm_head, "is_sharded", lambda _: True)
    assert next(largest(lm)) == TOKENS
