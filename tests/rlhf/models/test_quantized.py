"""Quantised weights: the right numbers, the products of the dequantised matrix, and an adapter that trains over them.

The oracle is a plain model with the dequantised weights, and for NF4 the table of the QLoRA paper (appendix E).
"""

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf import adapters
from rlhf.config.options import EngineOptions, FrozenOptions, OptimizerOptions
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.models import quantized
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading, load_backbone, load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel, load_scalar_model
from rlhf.training.checks import check_engine
from tests.support import tiny

INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
WIDE = {"llama": {"hidden_size": 64, "intermediate_size": 128}, "gpt2": {"n_embd": 64}}
"""rows of a multiple of 64 weights, which 4 bits on a CPU need"""
ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
LORA = "lora,r=4"
NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]  # fmt: skip
needs_package = pytest.mark.skipif(not INSTALLED, reason="the package bitsandbytes is not installed")
kinds = pytest.mark.parametrize("kind", ["nf4", "fp4"])
families = pytest.mark.parametrize("family", ["llama", "gpt2"])  # GPT-2 has transposed matrices, and biases


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family, sizes in WIDE.items():
        tiny.causal_lm(family, **sizes).save_pretrained(folder / family)
    return folder


def plain(model: PreTrainedModel, path: str) -> Any:
    """An ordinary model with the dequantised weights of `model`, from the same directory."""
    expected = load_causal_lm(path, model.dtype, tiny.VOCAB)
    for name, layer in quantized.quantized_layers(model).items():
        weight = quantized.dequantized_weight(layer)
        own = expected.get_submodule(name)
        with torch.no_grad():
            own.weight.copy_(weight.T if isinstance(own, Conv1D) else weight)
    return expected


def gradient(model: PreTrainedModel) -> Tensor:
    inputs = nn.functional.one_hot(ROWS.ids, tiny.VOCAB).to(model.dtype) @ model.get_input_embeddings().weight.detach()
    inputs.requires_grad_()
    model(inputs_embeds=inputs).logits.float().logsumexp(-1).sum().backward()
    assert inputs.grad is not None
    return inputs.grad


@needs_package
@kinds
@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_and_gradients_are_those_of_the_dequantised_weights(
    saved: Path, kind: Any, family: str, dtype: torch.dtype
) -> None:
    """Also after a pass in eval mode without gradients, in which bitsandbytes repacks weights on some CPUs."""
    model = tiny.unpacked(load_causal_lm(str(saved / family), dtype, tiny.VOCAB, Loading(quantize=kind)))
    expected = tiny.unpacked(plain(model, str(saved / family)))
    assert len(quantized.quantized_layers(model)) == (14 if family == "llama" else 8)
    with torch.no_grad():
        together = model(input_ids=ROWS.ids).logits
        assert torch.equal(together, expected(input_ids=ROWS.ids).logits)
        torch.testing.assert_close(together[:1], model(input_ids=ROWS.ids[:1]).logits)  # no neighbour is seen
    # The products are the same; only their order of additions may differ, which in bf16 shows.
    wanted, steps = gradient(expected).float(), 15  # products on the way back, each with one rounding
    assert (gradient(model).float() - wanted).norm() <= steps * torch.finfo(dtype).eps * wanted.norm()


@needs_package
def test_nf4_takes_the_nearest_of_the_sixteen_values_in_each_block(saved: Path) -> None:
    """Blocks of 64 weights have one scale, itself rounded: the values divided by it are those of the table."""
    model = load_causal_lm(str(saved / "llama"), torch.float32, tiny.VOCAB, Loading(quantize="nf4"))
    name = "model.layers.0.mlp.up_proj"
    blocks = tiny.causal_lm("llama", **WIDE["llama"]).get_submodule(name).weight.detach().view(-1, 64)
    values = quantized.dequantized_weight(model.get_submodule(name)).view(-1, 64)
    scales = values.abs().amax(1, keepdim=True)
    table = torch.tensor(NF4)
    nearest = (blocks / blocks.abs().amax(1, keepdim=True))[..., None].sub(table).abs().argmin(-1)
    torch.testing.assert_close(values / scales, table[nearest], rtol=0, atol=1e-6)  # the table has seven decimals
    # A scale is one of 256 values that are at most 1/64 of the greatest deviation from their mean apart there.
    spread = (blocks.abs().amax(1) - blocks.abs().amax(1).mean()).abs().max()
    assert (scales.squeeze(1) - blocks.abs().amax(1)).abs().max() <= spread / 64


def engine_of(model: nn.Module, **options: Any) -> Engine:
    optimizer = OptimizerOptions(learning_rate=1e-2, lr_scheduler_type="constant", warmup_ratio=0)
    return Engine(
        model,
        tiny.training_options(
            EngineOptions(**{"dtype": "fp32", "quantize": "nf4", "adapter": LORA, **options}), optimizer
        ),
        3,
    )


def train(engine: Engine, steps: int = 3) -> list[float]:
    count = ROWS.loss_mask.sum()
    micros = [ROWS[:2], ROWS[2:]]
    return [
        engine.step(micros, lambda rows: losses.token_nll(engine(rows)[0], rows.loss_mask, count))["loss"]
        for _ in range(steps)
    ]


@needs_package
@kinds
@families
def test_an_adapter_trains_over_them_and_merges_into_dequantised_weights(
    saved: Path, kind: Any, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = load_causal_lm(str(saved / family), torch.float32, tiny.VOCAB, Loading(quantize=kind))
    before = copy.deepcopy(dict(lm.named_parameters()))
    engine = engine_of(Policy(adapters.wrap(lm, LORA)), quantize=kind, gradient_checkpointing=family == "gpt2")
    with engine.inference() as policy:
        policy(ROWS)
    history = train(engine)
    assert history[2] < history[0]
    after = {name.replace(".base_layer", ""): weight for name, weight in lm.named_parameters()}
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    save_policy(engine, LORA, tiny.tokenizer(), tmp_path)
    assert "dequantised to float32" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "quantization_config")
    assert {name: w.shape for name, w in loaded.named_parameters()} == {
        name: w.shape for name, w in tiny.causal_lm(family, **WIDE[family]).named_parameters()
    }
    with engine.inference() as policy:
        torch.testing.assert_close(Policy(loaded)(ROWS)[0], policy(ROWS)[0], rtol=0, atol=1e-5)
        assert quantized.quantized_layers(policy)  # saving leaves the model as it was


@needs_package
def test_below_fp32_the_adapter_has_the_dtype_of_the_model_and_the_head_stays_exact(
    saved: Path, tmp_path: Path
) -> None:
    backbone = load_backbone(str(saved / "llama"), torch.bfloat16, tiny.VOCAB, Loading(quantize="nf4"))
    head = ScoreHead(torch.linspace(-1, 1, 64)[None] / 3, torch.bfloat16)
    engine = engine_of(ScalarModel(adapters.wrap(backbone, LORA), head), dtype="bf16")
    trained = {weight.dtype for weight in engine.module.parameters() if weight.requires_grad}
    assert trained == {torch.bfloat16}
    torch.testing.assert_close(engine.module.score.exact, torch.linspace(-1, 1, 64)[None] / 3)
    engine.step([ROWS], lambda rows: (engine(rows)[rows.mask].mean(), {}))
    save_scalar(engine, LORA, tiny.tokenizer(), tmp_path)
    whole = load_scalar_model(str(tmp_path), torch.bfloat16, tiny.VOCAB)
    again = load_scalar_model(
        str(tmp_path), torch.bfloat16, tiny.VOCAB, Loading(quantize="fp4")
    )  # as a frozen reward model
    assert torch.equal(again.score.exact, engine.module.score.exact) and torch.equal(
        whole.score.exact, again.score.exact
    )
    assert again(ROWS).dtype == torch.float32


@pytest.mark.parametrize("options", [{"offload": True}, {"zero_stage": 3}])
def test_a_frozen_model_that_moves_or_is_sharded_is_not_quantised(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="reward_models: --quantize nf4"):
        quantized.require_possible_frozen(FrozenOptions(quantize="nf4", **options), "reward_models")


def test_without_the_package_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rlhf-pipeline\[quantize\]'"):
        check_engine(EngineOptions(quantize="fp4", adapter="lora", dtype="fp32"))


@needs_package
def test_a_new_model_and_on_a_cpu_rows_of_incomplete_blocks_are_refused(tmp_path: Path) -> None:
    tiny.causal_lm("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="q_proj has rows of 32 weights, expected a multiple of 64 on a CPU"):
        load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB, Loading(quantize="nf4"))
    with pytest.raises(UserError, match="a new one has random weights"):
        load_causal_lm("configs/models/demo-llama.yaml", torch.float32, 300, Loading(quantize="nf4"))
