"""Inputs of strangers: nothing in them runs, what cannot be used is one line that names it, and the exit code is 2.

Whether something ran is told by a directory that the planted code makes. Sockets and secrets:
rlhf/chain/test_security_run.py; what no module may call: rules/test_security_source.py.
"""

import json
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.hub import offline
from rlhf.models.load import load_backbone, load_causal_lm, load_config
from rlhf.models.scalar import load_scalar_model
from rlhf.text.tokenizer import load_tokenizer
from step1_sft import __main__ as sft
from tests.support import payloads, tiny
from tests.support.programs import Run, runner


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A directory that is there if a payload ran."""
    return tmp_path / "ran"


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A good Llama with its tokenizer."""
    tiny.causal_lm("llama").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(model_path: Path) -> PreTrainedModel:
    return load_causal_lm(str(model_path), torch.float32, tiny.VOCAB)


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, ran: Path
) -> Callable[[Path], str]:
    """`python -m step1_sft --model PLACE`, which must end with code 2 and one line; that line."""
    run: Run = runner("step1_sft", sft.process, monkeypatch, capsys)
    (tmp_path / "x.jsonl").write_text("".join(f'{{"prompt": "w{i}", "response": "w{i} w5"}}\n' for i in range(4, 60)))
    data = ["--data-path", str(tmp_path / "x.jsonl"), "--data-split", "1,0,0", "--max-eval-rows", "4"]
    sizes = ["--batch-size", "4", "--max-length", "32", "--max-prompt-length", "16", "--dtype", "fp32"]

    def call(model_path: Path) -> str:
        code, _, stderr = run("--model", str(model_path), "--output-dir", str(tmp_path / "out"), *data, *sizes)
        assert not ran.exists(), "the payload ran"
        assert code == 2, stderr
        [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in stderr and str(model_path) in line
        return line

    return call


# --- weights


@pytest.mark.parametrize("kind", payloads.WRITERS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_no_payload_in_a_model_directory_runs(
    model_path: Path, ran: Path, kind: str, name: str, refused: Callable[[Path], str]
) -> None:
    state = payloads.weights_of(model_path / "model.safetensors")
    (model_path / "model.safetensors").unlink()
    payloads.WRITERS[kind](model_path / name, state, ran)
    message = refused(model_path)
    assert f"{name}: " in message
    if name.endswith(".bin"):
        assert "nothing of it was run" in message and "safetensors" in message and "weights_only" not in message
        code = {
            "a zipped pickle": "mkdir",
            "torch's old format": "mkdir",
            "torch's bytes inside a pickle": "from_bytes",
        }
        assert code.get(kind, "") in message


def test_a_shard_among_good_ones(model_path: Path, ran: Path, refused: Callable[[Path], str]) -> None:
    state = payloads.weights_of(model_path / "model.safetensors")
    (model_path / "model.safetensors").unlink()
    names = sorted(state)
    torch.save({name: state[name] for name in names[:5]}, model_path / "pytorch_model-00001-of-00002.bin")
    second = "pytorch_model-00002-of-00002.bin"
    payloads.write_zipped(model_path / second, {name: state[name] for name in names[5:]}, ran)
    shards = {name: "pytorch_model-00001-of-00002.bin" if name in names[:5] else second for name in names}
    (model_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert f"{second}: this pickle asks for code" in refused(model_path)


def test_safetensors_go_before_pickles(model_path: Path, ran: Path) -> None:
    """Whatever else lies beside good weights, nobody opens it."""
    before = load(model_path)
    names = ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "consolidated.00.pth", "training_args.bin")
    states = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "state.pkl", "flax_model.msgpack", ".metadata")
    for name in (*names, *states):
        payloads.write_plain(model_path / name, {}, ran)
    (model_path / "custom_generate").mkdir()
    for name in ("modeling_llama.py", "custom_generate/generate.py", "__init__.py", "conftest.py"):
        (model_path / name).write_text(payloads.evil_module(ran))
    after = load(model_path)
    load_backbone(str(model_path), torch.float32, tiny.VOCAB)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert not ran.exists()


@pytest.mark.parametrize("kind", payloads.WRITERS)
@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter_is_no_model(
    model_path: Path, ran: Path, kind: str, name: str, refused: Callable[[Path], str]
) -> None:
    """transformers lays it over the model in silence, and fetches the base model that it names."""
    payloads.WRITERS[kind](model_path / name, {}, ran)
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "someone/else"}
    (model_path / "adapter_config.json").write_text(json.dumps(adapter))
    assert "got an adapter (adapter_config.json), expected whole weights" in refused(model_path)


def test_an_index_stays_in_its_directory(model_path: Path, tmp_path: Path, refused: Callable[[Path], str]) -> None:
    shutil.move(model_path / "model.safetensors", tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", 3):
        shards = dict.fromkeys(payloads.weights_of(tmp_path / "outside.safetensors"), name)
        (model_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
        assert f"model.safetensors.index.json names {name!r}" in refused(model_path)
    (model_path / "model.safetensors.index.json").unlink()
    payloads.edit_json(model_path / "config.json", transformers_weights="../outside.safetensors")
    assert "must reference a file inside the model directory" in refused(model_path)


def test_a_reward_model_is_read_with_the_same_care(model_path: Path, ran: Path) -> None:
    state = {f"model.{name}": weight for name, weight in payloads.weights_of(model_path / "model.safetensors").items()}
    for kind in payloads.WRITERS:
        payloads.WRITERS[kind](model_path / "model.safetensors", state, ran)
        with pytest.raises(UserError, match=r"model\.safetensors: "):
            load_scalar_model(str(model_path), torch.float32, tiny.VOCAB)
    (model_path / "model.safetensors").unlink()
    payloads.write_zipped(model_path / "pytorch_model.bin", state, ran)
    with pytest.raises(UserError, match="no trained head"):  # the head is looked for in safetensors only
        load_scalar_model(str(model_path), torch.float32, tiny.VOCAB)
    save_file({"score.weight": torch.ones(1, tiny.WIDTH)}, model_path / "model-extra.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"pytorch_model\.bin: this pickle asks for code"):
        load_scalar_model(str(model_path), torch.float32, tiny.VOCAB)
    assert not ran.exists()


# --- config.json


@pytest.mark.parametrize("class_path", ["evil.C", "someone/else--evil.C"])
@pytest.mark.parametrize("known", [True, False])
def test_an_auto_map_never_runs(
    model_path: Path, ran: Path, class_path: str, known: bool, refused: Callable[[Path], str]
) -> None:
    """Of an architecture that transformers has itself the map is not looked at; any other is refused."""
    (model_path / "evil.py").write_text(payloads.evil_module(ran))
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer")
    payloads.edit_json(model_path / "config.json", auto_map=dict.fromkeys(kinds, class_path))
    if known:
        load(model_path)
        load_tokenizer(str(model_path))
    else:
        payloads.edit_json(model_path / "config.json", model_type="evil")
        assert "custom code" in refused(model_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    "value", ["someone/kernel", "flash|someone/kernel@main:fn", "paged|someone/kernel", {"": "someone/kernel"}]
)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_of_strangers_are_refused(model_path: Path, key: str, value: Any) -> None:
    payloads.edit_json(model_path / "config.json", **{key: value})
    with pytest.raises(UserError, match=r"config\.json requests code from the hub .*someone/kernel"):
        load_config(str(model_path))


@pytest.mark.parametrize("asked", [{"quant_method": "bitsandbytes"}, {"load_in_4bit": True}, {"load_in_8bit": True}])
def test_a_config_that_asks_for_bitsandbytes_is_refused(model_path: Path, asked: dict[str, object]) -> None:
    payloads.edit_json(model_path / "config.json", quantization_config=asked)
    with pytest.raises(
        UserError, match=r"quantization_config of bitsandbytes; expected the model that it was made from"
    ):
        load_config(str(model_path))


@pytest.mark.parametrize("key", ["_attn_implementation_internal", "_experts_implementation_internal"])
def test_a_kernel_under_another_name_is_not_asked_for(model_path: Path, key: str) -> None:
    payloads.edit_json(model_path / "config.json", **{key: "someone/kernel"})
    assert "someone/kernel" not in (
        load(model_path).config._attn_implementation,
        load(model_path).config._experts_implementation,
    )


# --- tokenizers


@pytest.mark.parametrize("class_path", ["evil.C", "someone/else--evil.C"])
@pytest.mark.parametrize("kind", [None, "C", "PreTrainedTokenizerFast"])
def test_code_beside_a_tokenizer_never_runs(model_path: Path, ran: Path, class_path: str, kind: str | None) -> None:
    for name in ("evil.py", "tokenization_evil.py", "C.py"):
        (model_path / name).write_text(payloads.evil_module(ran))
    own = {} if kind is None else {"tokenizer_class": kind}
    payloads.edit_json(
        model_path / "tokenizer_config.json", auto_map={"AutoTokenizer": [class_path, class_path]}, **own
    )
    if kind == "C":
        with pytest.raises(UserError, match="custom code"):
            load_tokenizer(str(model_path))
    else:
        assert load_tokenizer(str(model_path)).encode("w4 w5") == [4, 5]
    assert not ran.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_pickle_in_place_of_a_tokenizers_file(
    model_path: Path, ran: Path, name: str, refused: Callable[[Path], str]
) -> None:
    payloads.write_plain(model_path / name, {}, ran)
    assert ("no tokenizer can be loaded" if name == "tokenizer.json" else name) in refused(model_path)


def test_pickles_in_place_of_a_slow_tokenizers_files(
    model_path: Path, ran: Path, refused: Callable[[Path], str]
) -> None:
    (model_path / "tokenizer.json").unlink()
    for name in ("tokenizer.model", "spiece.model", "vocab.txt", "vocab.json", "merges.txt", "vocab.pkl"):
        payloads.write_plain(model_path / name, {}, ran)
    for kind in ("LlamaTokenizer", "T5Tokenizer", "TransfoXLTokenizer", "BertTokenizer"):
        payloads.edit_json(model_path / "tokenizer_config.json", tokenizer_class=kind)
        refused(model_path)


# --- YAML and names of models


def test_yaml_makes_plain_values_only(tmp_path: Path, ran: Path) -> None:
    (tmp_path / "model.yaml").write_text(f"model: !!python/object/apply:os.mkdir ['{ran}']\n")
    for read in (load_config, load_tokenizer):
        with pytest.raises(UserError, match=r"model\.yaml:1: not valid YAML"):
            read(str(tmp_path / "model.yaml"))
    assert not ran.exists()


@pytest.mark.parametrize("name", ["..", "a/..", "../a", "owner/../name", "a/b/../../c", "~/a", "a\0b"])
@pytest.mark.parametrize("url", ["", "file:///", "https://example.org/", "hf://"])
def test_a_model_is_a_directory_or_a_name_on_the_hub(
    name: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for read in (load_config, load_tokenizer):
        with pytest.raises(UserError) as caught:
            read(url + name)
        assert str(caught.value).splitlines() == [str(caught.value)]


# --- the hub


def test_a_name_server_that_is_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over, answers = threading.Event(), []

    def wait(*_: Any, **__: Any) -> None:
        answers.append(over.wait(60))
        raise socket.gaierror("no answer")

    assert offline.HUB_TIMEOUT <= 5
    monkeypatch.setattr(offline, "HUB_TIMEOUT", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", wait)
    with pytest.raises(UserError, match=r"owner/name.*does not answer.*HF_HUB_OFFLINE=1"):
        load_tokenizer("owner/name")
    assert not answers
    over.set()
