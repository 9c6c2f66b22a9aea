"""Packed rows beside padded ones: the same numbers, for every family that takes them, and no padding computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from rlhf import plugins
from rlhf.config.options import SamplingOptions
from rlhf.kernels import attention
from rlhf.maths.uniforms import uniforms
from rlhf.models import packing
from rlhf.models.head import ScoreHead
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel
from rlhf.types import Pairs, Sequences
from tests.support import tiny
from tests.support.families import ALL, WINDOWED

TAKE = {"opt", "gpt2", "llama", "qwen2", "qwen3", "gpt_neox", "mixtral"}
if Version(transformers.__version__) >= Version("5.24"):  # before, it had an attention of its own
    TAKE.add("gptj")
LENGTHS = [12, 20, 17, 6, 19, 1]
families = pytest.mark.parametrize("family", tiny.FAMILIES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def rows() -> Sequences:
    """Rows of unequal lengths, padded on both sides."""
    return tiny.padded(tiny.sequences(LENGTHS, prompts=[3, 9, 1, 2, 4, 1]), 2, 1)


def ready(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    attention.install(model.to(dtype))  # type: ignore[arg-type]
    return model


def both_ways(lm: nn.Module, ask: nn.Module, *inputs: object) -> Iterator[tuple[Tensor, Tensor]]:
    """What `ask` gives and its gradient in the weights, padded and then packed."""
    for pack in (False, True):
        if pack:
            packing.detect_support(lm, unsharded=True)  # type: ignore[arg-type]
        output = ask(*inputs)
        output = output[0] if isinstance(output, tuple) else output
        weights = [w for w in ask.parameters() if w.requires_grad]
        gradients = torch.autograd.grad(output.square().sum(), weights, allow_unused=True)
        yield output.detach(), torch.cat([g.flatten() for g in gradients if g is not None])


def require_near(lm: nn.Module, ask: nn.Module, dtype: torch.dtype, *inputs: object) -> None:
    (padded, expected), (packed, gradient) = both_ways(lm, ask, *inputs)
    exact = dtype == torch.float32
    assert (packed - padded).abs().max() <= (1e-5 if exact else 0.06)
    assert (gradient.double() - expected.double()).norm() <= (1e-5 if exact else 0.03) * expected.double().norm()


@families
@dtypes
def test_log_probs_and_their_gradients(family: str, dtype: torch.dtype) -> None:
    lm = ready(tiny.causal_lm(family), dtype)
    require_near(lm, Policy(lm), dtype, rows())  # type: ignore[arg-type]
    assert packing.packs(lm, 20) == (family in TAKE)


@pytest.mark.parametrize("window", [18, 20])
@pytest.mark.parametrize("family", sorted(WINDOWED))
def test_rows_are_packed_if_no_window_cuts_them(family: str, window: int) -> None:
    """A rollout with rows of up to 20 tokens, sampled and scored, beside transformers' own windows. The last token of a
    row predicts none, so a window of 18 is the longest that shows."""
    config = ALL[family] | {"sliding_window": window}
    lm, plain = ready(tiny.causal_lm(family, **config), torch.float32), tiny.causal_lm(family, **config)
    packing.detect_support(lm, unsharded=True)  # type: ignore[arg-type]
    assert packing.packs(lm, window) and not packing.packs(lm, window + 1)  # type: ignore[arg-type]
    generate = plugins.build("rlhf.generation", {"name": "loop", "eos_token_id": -1, "pad_token_id": tiny.PAD})
    draws = uniforms([(0, row) for row in range(4)], 11)
    rollout = generate(lm, tiny.prompts([4, 9, 6, 9]), SamplingOptions(response_length=11), draws)
    with torch.no_grad():
        scored, expected = (Policy(each)(rollout.sequences).logprobs for each in (lm, plain))  # type: ignore[arg-type]
    assert packing.packs_rows(lm, rollout.sequences) == (window == 20)  # type: ignore[arg-type]
    assert (scored - expected).abs().max() < 1e-5
    assert (rollout.sampled_logprobs - expected[:, 9:]).abs().max() < 1e-5


@families
@dtypes
def test_scalars_and_their_gradients(family: str, dtype: torch.dtype) -> None:
    lm = ready(tiny.backbone(family), dtype)
    head = ScoreHead(torch.linspace(-1, 1, 16 if family == "opt" else tiny.WIDTH)[None], dtype)
    require_near(lm, ScalarModel(lm, head), dtype, rows())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sorted(TAKE))
@dtypes
def test_pairs_in_one_row_keep_their_sides_apart(family: str, dtype: torch.dtype) -> None:
    lm = ready(tiny.backbone(family), dtype)
    head = ScoreHead(torch.linspace(-1, 1, 16 if family == "opt" else tiny.WIDTH)[None], dtype)
    chosen, rejected = (tiny.sequences([9, 20, 12], [1, 1, 1], width=24, seed=seed) for seed in (0, 1))
    rejected.ids[:, :6] = chosen.ids[:, :6]
    require_near(lm, ScalarModel(lm, head), dtype, Pairs(chosen, rejected).joined())  # type: ignore[arg-type]


def test_each_token_stands_in_one_place_and_padding_in_none() -> None:
    lengths = torch.tensor(LENGTHS)
    for dtype, full in ((torch.float32, 16), (torch.bfloat16, 32)):  # widths are whole vectors of 64 bytes
        layout = packing.Layout(lengths, dtype, lengths.device).padded
        assert [(count, width) for count, width, _ in layout.groups] == [(3, 32), (1, full), (1, full), (1, full)]
        assert torch.equal(layout.tokens[layout.slots], torch.arange(int(lengths.sum())))
        assert int(layout.empty.sum()) == 3 * 32 + 3 * full - sum(LENGTHS) and not layout.empty[layout.slots].any()


def test_no_padding_is_computed() -> None:
    lm = ready(tiny.causal_lm(), torch.float32)
    packing.detect_support(lm, unsharded=True)  # type: ignore[arg-type]
    shapes = []
    lm.get_submodule("model.layers.0.mlp").register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    Policy(lm)(rows())  # type: ignore[arg-type]
    assert shapes == [(1, sum(LENGTHS), tiny.WIDTH)]


def test_a_model_that_mixes_neighbours_is_found_out() -> None:
    class Mixing(nn.Linear):
        """Each token hears of the one before it, of another row too."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.roll(1, dims=1))

    lm = tiny.causal_lm()
    layer = lm.get_submodule("model.layers.0.mlp")
    mixing = Mixing(tiny.WIDTH, 64, bias=False)
    mixing.load_state_dict(layer.up_proj.state_dict())
    layer.up_proj = mixing
    ready(lm, torch.float32)
    packing.detect_support(lm, unsharded=True)
    assert not packing.packs(lm, 20)


def test_a_model_that_raises_for_packed_rows_is_padded() -> None:
    def refuse(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) == 1:
            raise ValueError("one row")

    lm = tiny.causal_lm()
    lm.get_submodule("model.layers.0.mlp").register_forward_pre_hook(refuse)
    packing.detect_support(ready(lm, torch.float32), unsharded=True)  # type: ignore[arg-type]
    assert not packing.packs(lm, 20)


@pytest.mark.parametrize("whole", [True, False])
def test_a_rollout_of_latent_attention(whole: bool) -> None:
    """Its cache holds other things than attention gets, so the log-probs of sampling show which of them was read."""
    lm = tiny.causal_lm("deepseek_v3", **tiny.LATENT)
    attention.install(lm)
    packing.detect_support(lm, unsharded=whole)
    generate = plugins.build("rlhf.generation", {"name": "loop", "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD})
    draws = uniforms([(0, row) for row in range(3)], 12)
    rollout = generate(lm, tiny.prompts([3, 9, 8]), SamplingOptions(response_length=12), draws)
    with torch.no_grad():
        scored = Policy(lm)(rollout.sequences).logprobs
    assert (rollout.sampled_logprobs - scored[:, 9:]).abs().max() < 1e-5  # as tests/contracts/test_generation.py


def test_recomputed_activations_know_the_rows_too() -> None:
    lm = ready(tiny.causal_lm(), torch.float32).train()
    packing.detect_support(lm, unsharded=True)  # type: ignore[arg-type]
    gradients = []
    for _ in range(2):
        value = Policy(lm)(rows()).logprobs.sum()  # type: ignore[arg-type]
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(lm.parameters()))]))
        lm.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6)


def test_a_model_that_is_read_is_tried(tmp_path: Path) -> None:
    for family in ("llama", "gemma2"):
        tiny.causal_lm(family).save_pretrained(tmp_path / family)
        lm = load_causal_lm(str(tmp_path / family), torch.float32, tiny.VOCAB)
        assert packing.packs(lm, 20) == (family in TAKE)
