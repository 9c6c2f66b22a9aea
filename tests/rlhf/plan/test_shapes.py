"""Models with a short name have their config in configs/shapes/, with exactly as many weights as are published."""

import re

import pytest
import torch

from rlhf.hub import short_names
from rlhf.models import load
from rlhf.plan import activations, sizes

PUBLISHED = {
    "opt-125m": 125_239_296, "opt-350m": 331_196_416, "opt-1.3b": 1_315_758_080, "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288, "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "pythia-14m": 14_067_712, "pythia-31m": 30_494_720, "pythia-70m": 70_426_624, "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680, "gpt-j-6b": 6_050_882_784,
    "gpt-neo-125m": 125_198_592, "gpt-neo-1.3b": 1_315_575_808, "gpt-neo-2.7b": 2_651_307_520,
    "bloom-560m": 559_214_592, "bloom-1b1": 1_065_314_304, "bloom-1b7": 1_722_408_960, "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064, "bloom": 176_247_271_424,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "tinyllama-1.1b-chat-v1.0": 1_100_048_384,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176, "gemma-3-1b-pt": 999_885_952, "gemma-3-4b-pt": 3_880_263_168,
    "gemma-3-12b-pt": 11_766_034_176,
    "smollm3-3b": 3_075_098_624, "glm-4-9b-0414": 9_400_279_040, "glm-4-9b": 9_399_951_360,
}  # fmt: skip
"""Numbers of weights: those of the model pages; of OPT from 30B on, of table 1 of the paper by the formula of a layer,
12 d^2 + 13 d, with 50272 + 2050 embeddings and a last norm of 2 d; of Gemma 3 from 4B on, without the vision tower
(416,866,032) and its projector (1152 (d + 1))."""


def count(name: str) -> int:
    """Weights of the model with 2 layers, and for each further pair of layers as many as layers 3 and 4 have."""
    few, more = (weights(name, layers) for layers in (2, 4))
    return few + (sizes.read_config(name).num_hidden_layers - 2) // 2 * (more - few)


def weights(name: str, layers: int) -> int:
    with torch.device("meta"):
        model = sizes.build(activations.with_layers(sizes.read_config(name), layers), "lm")
    return sum(weight.numel() for weight in model.parameters())


def test_a_shape_has_the_published_number_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_config", lambda path: pytest.fail(f"{path}: asks the hub"))
    assert {name: count(name) for name in PUBLISHED} == PUBLISHED


def test_every_short_name_and_hub_id_has_a_shape() -> None:
    """Variants of a model (chat, instruct, base) have the shape of the model itself."""
    shapes, presets = sizes.shapes(), {str(path) for path in short_names.PRESETS.values()}
    ids = {*short_names.known_names().values()} - presets
    assert {short_names.short_name(model_id) for model_id in ids} == {*shapes} - {"opt-175b"}
    for name in ("facebook/opt-13b", "Facebook/OPT-13B", "opt-13b", "OPT-13B"):
        assert sizes.read_config(name).hidden_size == 5120
    for name, values in shapes.items():
        name = re.sub("^(gemma-3-[0-9]+b)-it$", r"\1-pt", name)
        base = re.sub("^bloomz", "bloom", re.sub("-(instruct|chat|base|it)(?=$|-v0.3)", "", name))
        assert values == shapes[base if base in PUBLISHED else name], name
        assert base in PUBLISHED or name == "tinyllama-1.1b-chat-v1.0"


def test_a_model_of_another_owner_has_no_shape() -> None:
    assert short_names.short_name("somebody/opt-13b") == "somebody/opt-13b"
    assert sizes.shapes().get("somebody/opt-13b") is None
