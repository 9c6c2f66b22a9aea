"""The mean of saved models: every tensor against float64, what is kept of the first model, and what is refused."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from rlhf.chain import average
from rlhf.models import averaging
from rlhf.models.scalar import HEAD, load_scalar_model
from rlhf.storage import disk
from tests.support import tiny
from tests.support.programs import Run, runner

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
"""half a unit in the last place of a number below 1"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three reward models in bf16 with heads in fp32. The second is in one file, the others in two."""
    base = tmp_path_factory.mktemp("models")
    model = tiny.backbone("gpt2").bfloat16()
    model.config.architectures = ["GPT2ForSequenceClassification"]
    model.config.num_labels = 1
    for number in range(3):
        folder = base / str(number)
        draw = torch.Generator().manual_seed(number)
        model.config.score_mean = float(number)
        model.config.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        state = {
            f"transformer.{name}": weight + (0.1 * torch.randn(weight.shape, generator=draw)).to(weight.dtype)
            for name, weight in model.state_dict().items()
        }
        state[HEAD] = torch.randn(1, tiny.WIDTH, generator=draw)
        state["counter"] = torch.tensor([7])
        names = sorted(state)
        parts = [names] if number == 1 else [names[:5], names[5:]]
        for n, part in enumerate(parts, 1):
            disk.save_tensors({k: state[k] for k in part}, folder / f"model-{n}.safetensors", {"format": "pt"})
        files = {name: f"model-{n}.safetensors" for n, part in enumerate(parts, 1) for name in part}
        disk.write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    return [base / str(number) for number in range(3)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    transformers.utils.logging.disable_progress_bar()
    yield runner("average", average.main, monkeypatch, capsys)
    transformers.utils.logging.enable_progress_bar()


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def test_each_tensor_is_the_mean(run: Run, folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "mean"
    code, output, errors = run(*map(str, folders), "--out", str(out))
    assert (code, output, errors) == (0, f"wrote {out}: the mean of 3 models\n", "")
    parts, mean = [tensors(folder) for folder in folders], tensors(out)
    assert mean.keys() == parts[0].keys() and mean["counter"].tolist() == [7]
    for name in mean.keys() - {"counter"}:
        exact = torch.stack([part[name].double() for part in parts]).mean(0)
        # The mean is rounded once to its dtype; before that two sums and a quotient were rounded to fp32, each of a
        # number up to three times as large.
        size = 2.0 ** math.ceil(math.log2(max(part[name].abs().max().item() for part in parts)))
        assert mean[name].dtype == parts[0][name].dtype
        assert (mean[name].double() - exact).abs().max() <= size * (EPS[mean[name].dtype] + 9 * EPS[torch.float32])
    config = json.loads((out / "config.json").read_text())
    assert "score_mean" not in config and config["architectures"] == ["GPT2ForSequenceClassification"]
    assert {file.name for file in out.iterdir()} == {*(f.name for f in folders[0].iterdir()), "README.md"}
    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "# The mean of 3 models" in card and "2401.12187" in card
    assert str(tmp_path) not in card
    for file in (*out.glob("*.safetensors"), out / "model.safetensors.index.json"):
        file.unlink()
    disk.save_tensors({n: w for n, w in mean.items() if n != "counter"}, out / "model.safetensors", {"format": "pt"})
    model = load_scalar_model(str(out), torch.float32, tiny.VOCAB)
    torch.testing.assert_close(model.score.exact, mean[HEAD], rtol=0, atol=0)
    loaded = model.backbone.state_dict()["ln_f.weight"]
    torch.testing.assert_close(loaded, mean["transformer.ln_f.weight"].float(), rtol=0, atol=0)


def test_the_mean_of_a_model_and_its_copy_is_the_model(folders: list[Path], tmp_path: Path) -> None:
    averaging.write_average([folders[0], folders[0]], tmp_path)
    expected, mean = tensors(folders[0]), tensors(tmp_path)
    assert all(torch.equal(expected[name], mean[name]) for name in expected)


UNLIKE = {
    "config": "got 9, expected n_head 4 in config.json as in",
    "shape": "got BF16 [31], expected tensor transformer.ln_f.bias: BF16 [32] as in",
    "dtype": "got F32 [32], expected tensor transformer.ln_f.bias: BF16 [32] as in",
    "name": "got no such tensor, expected tensor transformer.ln_f.bias: BF16 [32] as in",
    "integers": "tensor counter has integers that differ between the models",
    "nan": "tensor transformer.ln_f.bias: the mean of 2 models has values that are not finite",
    "tokenizer": "got another tokenizer or chat template than that of",
    "adapter": "got an adapter, expected a whole model; rlhf export",
    "empty": "no model, expected a directory with config.json and *.safetensors",
}


@pytest.mark.parametrize("change", UNLIKE)
def test_unlike_models_are_refused(change: str, run: Run, folders: list[Path], tmp_path: Path) -> None:
    other, out, name = tmp_path / "other", tmp_path / "out", "transformer.ln_f.bias"
    shutil.copytree(folders[1], other)
    file = other / "model-1.safetensors"
    state = load_file(file)
    changed = {"shape": torch.zeros(31).bfloat16(), "dtype": torch.zeros(32)}
    if change in changed:
        state[name] = changed[change]
    elif change == "name":
        state[f"{name}.other"] = state.pop(name)
    elif change == "nan":
        state[name] = torch.full((32,), math.nan, dtype=torch.bfloat16)
    elif change == "integers":
        state["counter"] = torch.tensor([8])
    elif change == "config":
        disk.write_json(other / "config.json", disk.read_json(other / "config.json") | {"n_head": 9})
    elif change == "tokenizer":
        tiny.tokenizer(reverse=True).save_pretrained(other)
    disk.save_tensors(state, file, {"format": "pt"})
    if change == "empty":
        file.unlink()
    if change == "adapter":
        file.rename(other / "adapter_model.safetensors")
        (other / "adapter_config.json").write_text("{}")
    code, _, errors = run(str(folders[0]), str(other), "--out", str(out))
    assert (code, errors.count("\n")) == (2, 1) and UNLIKE[change] in errors
    assert not out.exists()


def test_mistakes_of_the_command(run: Run, folders: list[Path], tmp_path: Path) -> None:
    one, two = map(str, folders[:2])
    expected = "error: rlhf average: expected MODEL MODEL ... --out DIR, two models or more\n"
    assert run(one, "--out", "x")[::2] == run(one, two)[::2] == (2, expected)
    assert f"got a model twice in {one} {one}" in run(one, one, "--out", "x")[2]
    (tmp_path / "file").touch()
    assert f"--out {tmp_path}: it exists, expected a new directory" in run(one, two, "--out", str(tmp_path))[2]
